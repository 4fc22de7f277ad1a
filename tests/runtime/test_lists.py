"""Lists, strings and optional results, which the launch runtime passes without Python."""

import random
from functools import partial

import pytest
import torch
from calls_of_ops import SUM, misses, warmed
from helpers import programs_of, run_threads

from jitkern import config
from jitkern.errors import LaunchError
from jitkern.runtime import specializer

SCALE = """
extern "C" void scale(T *const *data, const long *numel, long count, double a) {
  for (long i = 0; i < count; i++)
    for (long j = 0; j < numel[i]; j++) data[i][j] *= a;
}
"""
STEP = """
template <typename T, typename U>
void step(T *const *p, const long *numel, long count, U *const *g, const long *, long, double lr) {
  for (long i = 0; i < count; i++)
    for (long j = 0; j < numel[i]; j++) p[i][j] -= lr * g[i][j];
}
"""
PUT = 'extern "C" void put(double *out, double a, long n) { for (long i = 0; i < n; i++) out[i] = a; }'
ADD = 'extern "C" void add(double *out, const float *x) { *out += *x; }'
ONES = [torch.ones(2), torch.ones(2, 3), torch.ones(0), torch.ones(())]


@pytest.fixture
def summing(declare):
    """An op that sums its tensors by tables, the factor of which may depend on them."""

    def summing(factor=lambda table, a: a, dense=False):
        def launch(k, xs, a):
            out = torch.zeros((), dtype=torch.float64)
            for table in k.tables(xs, dense=dense):
                k.total[{"T": table.dtype}](out, table, factor(table, a))
            return out

        return declare("(Tensor[] xs, float a=1.0) -> Tensor", SUM, launch)

    return summing


@pytest.fixture
def total(summing):
    return summing()


@pytest.fixture
def scaling(declare):
    """An op that changes all tensors of a list."""

    def launch(k, xs, a):
        for table in k.tables(xs):
            k.scale[{"T": table.dtype}](table, a)

    return declare("(Tensor(a!)[] xs, float a) -> ()", SCALE, launch)


@pytest.mark.long
def test_a_table_serves_lists_of_other_lengths_ranks_and_sizes(total):
    warmed(total, ONES)
    before = misses(total)
    assert float(total(ONES[:1], 0.5)) == 1
    assert float(total([torch.ones(3, 3, 3)] * 31)) == 27 * 31
    assert misses(total) == before


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 32, 33, 128, 129, 1024, 1025, 2100])
def test_every_capacity_holds_what_it_should(total, count):
    xs = [torch.full((i % 3,), 1.0) for i in range(count)]
    wanted = float(sum(i % 3 for i in range(count)))
    assert float(total(xs)) == wanted
    specializer.settle()
    before = misses(total)
    assert float(total(xs)) == wanted
    assert misses(total) == before, programs_of(total).refused
    assert len(programs_of(total).known) == 1
    assert float(total(xs[: count * 2 // 3])) == sum(i % 3 for i in range(count * 2 // 3))


@pytest.mark.long
def test_tensors_of_several_dtypes_are_several_tables(total):
    mixed = [torch.ones(3), torch.ones(2).double(), torch.ones(4), torch.ones(1).double()]
    assert float(warmed(total, mixed)(mixed)) == 10
    before = misses(total)
    assert float(total(mixed[:2])) == 5
    assert misses(total) == before
    assert float(total(mixed[1:])) == 7, "another order of the dtypes"
    assert float(total(mixed[:1])) == 3, "one dtype alone"
    assert misses(total) == before + 2


@pytest.mark.long
@pytest.mark.parametrize(("tables", "most"), [(1, 1 << 16), (3, 1 << 15)], ids=["one", "together"])
def test_tables_beyond_a_megabyte_stay_with_python(declare, tables, most):
    def launch(k, xs, a):
        out = torch.zeros((), dtype=torch.float64)
        for chunk in range(1, tables + 1):
            for table in k.tables(xs, chunk=chunk, most=most):
                k.total[{"T": table.dtype}](out, table, a)
        return out

    op = declare("(Tensor[] xs, float a=1.0) -> Tensor", SUM, launch)
    many = [torch.ones(1)] * 1100
    for _ in range(2):
        assert float(op(many)) == 1100 * tables
        specializer.settle()
    assert "more than a megabyte" in str(programs_of(op).refused)
    if tables == 1:
        assert float(warmed(op, many[:9])(many[:9])) == 9


ON_A_SMALL_STACK = """
import threading, torch
from jitkern.declare import Cpp, kernel
from jitkern.runtime import specializer
op = kernel("lists::total(Tensor[] xs, float a=1.0) -> Tensor", cpu=Cpp(text=TEXT))
@op.launch("cpu")
def _(k, xs, a):
    out = torch.zeros((), dtype=torch.float64)
    for table in k.tables(xs):
        k.total[{"T": table.dtype}](out, table, a)
    return out
xs, results = [torch.ones(1)] * COUNT, []
def work():
    results.append(float(op(xs)))
for small in (False, False, True):
    before = op.programs["cpu"].misses
    threading.stack_size((256 << 10) * small)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    specializer.settle()
slot = op.programs["cpu"]
print(*results, slot.misses - before, len(slot.known))
"""


@pytest.mark.long
@pytest.mark.parametrize("count", [1000, 40_000])
def test_tables_are_filled_in_a_thread_with_a_small_stack(count, run_python):
    found = run_python(f"TEXT, COUNT = {SUM!r}, {count}\n{ON_A_SMALL_STACK}")
    assert found.stdout == f"{count}.0 {count}.0 {count}.0 0 1\n", found


@pytest.mark.long
def test_an_empty_list_launches_nothing(total):
    assert float(warmed(total, [])([])) == 0
    assert float(total(ONES)) == 9


@pytest.mark.long
def test_a_tensor_that_no_table_takes_is_refused_with_its_place(total):
    warmed(total, ONES)
    with pytest.raises(LaunchError, match="tensor 1, of strides .*, is not contiguous"):
        total([torch.ones(2), torch.ones(4, 4).t()[:2]])
    assert float(total([torch.ones(2), torch._neg_view(torch.ones(3))])) == -1


@pytest.mark.long
def test_dense_tensors_may_have_any_order_of_dimensions(summing):
    op = summing(dense=True)
    image = torch.rand(2, 3, 4, 5)
    wide = image.to(memory_format=torch.channels_last)
    warmed(op, [image, image])
    before = misses(op)
    torch.testing.assert_close(op([wide, image.permute(3, 1, 0, 2), torch.ones(3, 1, 2).mT]).item(), 2 * image.double().sum().item() + 6, rtol=1e-6, atol=0)  # fmt: skip
    assert misses(op) == before
    for gaps in (image[:, 1:], torch.ones(3, 1).expand(3, 4)):
        with pytest.raises(LaunchError, match="has gaps"):
            op([gaps])


@pytest.mark.long
def test_changed_lists_are_changed_and_their_versions_rise(scaling):
    op = scaling
    xs = [torch.ones(3), torch.ones(2, 2).double()]
    for turn in range(1, 4):
        versions = [x._version for x in xs]
        op(xs, 2.0)
        specializer.settle()
        assert [float(x.sum()) for x in xs] == [3 * 2.0**turn, 4 * 2.0**turn]
        assert all(x._version > before for x, before in zip(xs, versions))
    assert misses(op) == 1
    with torch.inference_mode():
        inside = [torch.ones(2)]
        op(inside, 3.0)
    with pytest.raises(RuntimeError, match="inference tensor outside InferenceMode is not allowed"):
        op(inside, 3.0)
    assert inside[0].tolist() == [3, 3]
    saved = torch.ones(3, requires_grad=True)
    squared = (saved * saved.detach().clone()).sum()
    weight = torch.ones(2)
    product = (torch.ones(2, requires_grad=True) * weight).sum()
    op([weight], 2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    squared.backward()


@pytest.mark.long
def test_ops_with_lists_pass_opcheck_and_compile(total, maybe, scaling):
    torch.library.opcheck(total.overload, ([torch.ones(3), torch.ones(2).double()], 2.0))
    torch.library.opcheck(scaling.overload, ([torch.ones(3), torch.ones(2).double()], 2.0))
    for n in (0, 2):
        torch.library.opcheck(maybe.overload, (torch.ones(1), n))

    def both(a, b):
        ys = [a * 2, b * 3]
        scaling(ys, 2.0)
        return total(ys) + 1

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (3, 4):
        assert float(compiled(torch.ones(n), torch.ones(n, 2))) == 16 * n + 1
    none = torch.compile(lambda x: maybe(x, 0), backend="aot_eager", fullgraph=True)(torch.ones(1))
    assert none[0] is None


ANOTHER_PROCESS = """
import torch
from jitkern.declare import Cpp, kernel
from jitkern.runtime import specializer
traced, real = [], specializer.trace
specializer.trace = lambda *rest: (traced.append(1), real(*rest))[1]
op = kernel("lists::total(Tensor[] xs, str mode, int[] more) -> Tensor", cpu=Cpp(text=TEXT))
@op.launch("cpu")
def _(k, xs, mode, more):
    out = torch.zeros((), dtype=torch.float64)
    for table in k.tables(xs):
        k.total[{"T": table.dtype}](out, table, float(more[0]) if mode == "by" else 1.0)
    return out
for count in (3, 20):
    for mode in ("by", "sum"):
        for _ in range(2):
            result = op([torch.ones(2)] * count, mode, [4])
            specializer.settle()
        assert float(result) == 2 * count * (4 if mode == "by" else 1)
slot = op.programs["cpu"]
print(len(traced), len(slot.known), slot.refused)
"""


@pytest.mark.long
def test_another_process_has_the_stub_of_a_list_by_its_plan(run_python):
    found = [run_python(f"TEXT = {SUM!r}\n{ANOTHER_PROCESS}") for _ in range(2)]
    assert [run.stdout for run in found] == ["2 2 {}\n", "0 2 {}\n"], found


@pytest.mark.long
def test_several_lists_belong_together(declare):
    def launch(k, ps, gs, lr):
        for p, g in k.tables(ps, gs):
            k.step[{"T": p.dtype, "U": g.dtype}](p, g, lr)

    op = declare("(Tensor(a!)[] ps, Tensor[] gs, float lr) -> ()", STEP, launch)
    for _ in range(2):
        ps = [torch.full((n,), 3.0, dtype=d) for n, d in ((2, torch.float32), (3, torch.float64), (0, torch.float32))]  # fmt: skip
        op(ps, [torch.ones(2), torch.ones(3), torch.ones(0)], 0.5)
        assert [p.tolist() for p in ps] == [[2.5] * 2, [2.5] * 3, []]
        specializer.settle()
    assert misses(op) == 1
    with pytest.raises(LaunchError, match=r"tensors 1 of the lists have \(3, 2\) elements"):
        op([torch.ones(2), torch.ones(3)], [torch.ones(2), torch.ones(2)], 0.5)
    with pytest.raises(LaunchError, match=r"the lists have \[2, 1\] tensors"):
        op([torch.ones(2), torch.ones(3)], [torch.ones(2)], 0.5)


@pytest.mark.long
def test_alignment_is_guarded_only_where_it_is_asked_for(summing):
    op = summing(lambda table, a: a if table.aligned(16) else -a)
    base = torch.ones(9)
    assert float(warmed(op, ONES)(ONES)) == 9
    assert float(warmed(op, [base[:4], base[1:]])([base[:4], base[1:]])) == -12
    assert misses(op) == 2


@pytest.mark.long
def test_a_tensor_of_a_list_is_a_tensor_with_guards(declare):
    def launch(k, xs, only):
        out = torch.zeros((), dtype=torch.float64)
        for x in xs[only[0] :] if only else xs:
            torch._check(x.numel() == 1, lambda x=x: f"{x.numel()} elements")
            k.add(out, x)
        return out if len(xs) else torch.ones((), dtype=torch.float64)

    op = declare("(Tensor[] xs, int[] only) -> Tensor", ADD, launch)
    three = [torch.tensor(float(i)) for i in range(3)]
    assert float(warmed(op, three, [])(three, [])) == 3
    assert misses(op) == 1
    assert float(op(three[1:], [])) == 3, "another length"
    assert float(op([three[1].reshape(1), *three[1:]], [])) == 4, "another rank"
    assert float(op([], [])) == 1
    assert misses(op) == 4
    with pytest.raises(RuntimeError, match="2 elements"):
        op([torch.ones(2)], [])


def test_a_list_that_the_launch_function_changes_is_its_own(declare):
    def launch(k, x, ns):
        ns.reverse()
        out = torch.empty(2, dtype=torch.float64)
        k.put(out, ns.pop(0), 2)
        return out

    def reference(x, ns):
        ns.reverse()
        return torch.full((2,), float(ns.pop(0)), dtype=torch.float64)

    op = declare("(Tensor x, int[] ns) -> Tensor", PUT, launch, reference)
    with config.using(compile="never", fallback="reference"):
        assert op(ONES[0], [1, 2])[0] == 2
    assert warmed(op, ONES[0], [1, 2])(ONES[0], [3, 4])[0] == 4
    assert misses(op) == 2, "the call by the reference, and the first by the kernel"


@pytest.mark.long
def test_numbers_strings_and_bools_in_lists_reach_the_kernel(declare):
    def launch(k, x, ns, fs, bs, mode, other, more):
        out = torch.empty(len(ns) + 1, dtype=torch.float64)
        n = sum(ns) + (sum(more) if more is not None else 0)
        value = n + sum(fs) * (2 if mode == "twice" else 1) + (1000 if bs[0] else 0)
        k.put(out, value if other != "ü\0\\" else -value, out.numel())
        return out

    schema = "(Tensor x, int[] ns, float[] fs, bool[2] bs, str mode='', str? other=None, int[]? more=None) -> Tensor"
    op = declare(schema, PUT, launch)
    x = torch.ones(1)
    calls = [
        (x, [1, -2], [0.5], [True, False]),
        (x, [5, 2**40], [-1.5], [True, False]),
        (x, [1, -2], [0.5], [False, False], "twice"),
        (x, [1, -2], [0.5], [False, False], "twice", None, [7]),
        (x, [], [], [False, True], "", "ü\0\\"),
        (x, [], [], [False, True], "", "ü", []),
    ]
    wanted = [[999.5] * 3, [2**40 + 1003.5] * 3, [0.0] * 3, [7.0] * 3, [0.0], [0.0]]
    for call, expected in zip(calls, wanted):
        assert op(*call).tolist() == expected
        specializer.settle()
    before = misses(op)
    assert before == 5, "numbers alone make no stub of their own"
    assert [op(*call).tolist() for call in calls] == wanted
    assert misses(op) == before


@pytest.fixture
def maybe(declare):
    def launch(k, x, n):
        torch._check(n >= 0, lambda: "n is negative")
        out = torch.empty(1, dtype=torch.float64)
        k.put(out, 1.0, 1)
        if not n:
            return None, out
        more = torch.empty(n, dtype=torch.float64)
        k.put(more, 2.0, n)
        return more, out

    return declare("(Tensor x, int n) -> (Tensor? more, Tensor out)", PUT, launch)


@pytest.mark.long
def test_a_result_may_be_none(maybe):
    x = torch.ones(1)
    for _ in range(3):
        assert maybe(x, 0) == (None, torch.ones(1, dtype=torch.float64))
        more, out = maybe(x, 3)
        assert more.tolist() == [2.0] * 3
        assert out.tolist() == [1]
        specializer.settle()
    assert misses(maybe) == 2
    for _ in range(2):
        with pytest.raises(RuntimeError, match="n is negative"):
            maybe(x, -1)


@pytest.mark.long
def test_one_result_alone_may_be_none(declare):
    def launch(k, x, want):
        if not want:
            return None
        out = torch.empty(1, dtype=torch.float64)
        k.put(out, 1.0, 1)
        return out

    op = declare("(Tensor x, bool want) -> Tensor?", PUT, launch)
    for _ in range(3):
        assert op(torch.ones(1), False) is None
        assert op(torch.ones(1), True).tolist() == [1]
        specializer.settle()
    assert misses(op) == 2


def test_none_for_a_result_that_is_no_option_is_an_error(declare):
    op = declare("(Tensor x) -> (Tensor?, Tensor)", PUT, lambda k, x: (None, None))
    with pytest.raises(LaunchError, match="returned None as result 2"):
        op(torch.ones(1))


@pytest.mark.long
def test_threads_call_with_lists_of_their_own(total):
    wrong = []

    def work(seed):
        draw = random.Random(seed)
        for _ in range(300):
            xs = [torch.ones(draw.randrange(5)) for _ in range(draw.randrange(140))]
            if float(total(xs)) != sum(x.numel() for x in xs):
                wrong.append(seed)

    run_threads(*(partial(work, i) for i in range(4)))
    assert not wrong
