"""What a warm process needs not trace, and what it must trace all the same."""

import contextlib
import functools
import itertools
import marshal
import math
import operator
import os
import sys
from collections import namedtuple

import pytest
import torch
from helpers import programs_of, served

from jitkern import config, jit, target as target_module, testing
from jitkern.cache import eviction
from jitkern.cache.store import Cache
from jitkern.calls import signature
from jitkern.declare import Cpp, kernel
from jitkern.op.all_ops import all_ops
from jitkern.prewarming import call_traces
from jitkern.runtime import records, specializer
from jitkern.target import Target
from jitkern.trace.scope import Scope

_number = itertools.count()
X = torch.ones(3)
Named = namedtuple("Named", "name schema")
SIZES = (1, 2)
OBJECT = object()


def helper(x):
    return x.numel() + SIZES[0]


def plain(k, x, n=2):
    torch._check(x.dim() > 0, lambda: f"no scalars, got {tuple(x.shape)}")
    out = torch.empty_like(x, dtype=torch.float32)
    k.f(out, helper(x), max(n, 1))
    return out


def reads_the_environment(k, x):
    return torch.empty(int(os.environ["N"]))


def reads_the_device(k, x):
    return torch.empty(torch.cuda.device_count())


def reads_an_object(k, x):
    return OBJECT


def imports(k, x):
    import math

    return math.pi


def asks_the_builtins(k, x):
    return open("x")


def identity_of(function):
    """What records of a launch function are kept under; None where there are none."""
    key = class_of_calls(function).key(Scope([function]))
    return key and key.digest


def class_of_calls(function, source=None, args=(X, 2), device="cpu", op=None):
    op, source, device = op or Named("x::y", "x::y()"), source or Cpp("k.cpp"), torch.device(device)
    call = signature.class_of(args)
    return records.CallClass(op, function, source, Target.current("cpu"), device, call)


@pytest.mark.parametrize(
    "function",
    [reads_the_environment, reads_the_device, reads_an_object, imports, asks_the_builtins, torch.add],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_a_function_that_reads_more_has_none(declared, cache_dir, function):
    op = declared(function)
    with contextlib.suppress(Exception):
        op(X, 2)
    specializer.settle()
    with contextlib.suppress(Exception):
        op(X, 2)
    specializer.settle()
    assert not list(cache_dir.glob("v1/*/*.call.*"))


HALVES = frozenset((torch.float16, torch.bfloat16))
FEW = frozenset((8, 0))
ORDERED = {
    "display": (lambda k, x: [*{"a", "b"}], False),
    "display of tensors": (lambda k, x, y: len({x.dtype, y.dtype}), False),
    "comprehension": (lambda k, xs: [*{x.dtype for x in xs}], False),
    "set": (lambda k, x: [*set("ab")], False),
    "keys": (lambda k, x: [*({"a": 1, "b": 2}.keys() & {"a", "b"})], False),
    "name": (lambda k, x: [*HALVES], False),
    "in a display": (lambda k, x: x.dtype in {torch.float16, torch.bfloat16}, True),
    "in a constant": (lambda k, x: str(x.dtype) in {"torch.float16", "torch.bfloat16"}, True),
    "in a name": (lambda k, x: x.dtype in HALVES, True),
    "items": (lambda k, x: [value for _, value in {"a": 1, "b": 2}.items()], True),
    "integers": (lambda k, x: [*FEW], False),
    "in integers": (lambda k, x: x.shape[0] in FEW, True),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERED)
def test_the_order_of_a_set_is_of_one_process(name):
    function, has_records = ORDERED[name]
    assert bool(identity_of(function)) == has_records


def in_another_order(values):
    """Return a set of values that are plain, and an equal one that is iterated in another order."""
    pairs = itertools.permutations(values, 2)
    one, other = next((a, b) for a, b in pairs if [*frozenset((a, b))] != [*frozenset((b, a))])
    return frozenset((one, other)), frozenset((other, one))


@pytest.mark.parametrize("values", [[0, 8], [f"name{i}" for i in range(9)]], ids=["int", "str"])
def test_the_order_of_a_set_is_no_part_of_the_identity(monkeypatch, values):
    found = set()
    for few in in_another_order(values):
        monkeypatch.setitem(globals(), "FEW", few)
        found.add(identity_of(ORDERED["in integers"][0]))
    assert len(found) == 1
    assert None not in found


def test_code_of_a_pyc_has_the_identity_of_its_source():
    compiled = compile("lambda k, x: x.shape[0] in {7, 15}", "", "eval")
    read = marshal.loads(marshal.dumps(compiled))  # as from a .pyc
    functions = [eval(code, {}) for code in (compiled, read)]
    orders = [[*c] for f in functions for c in f.__code__.co_consts if type(c) is frozenset]
    assert orders[0] != orders[1]
    assert identity_of(functions[0]) == identity_of(functions[1]) is not None


def up(x):
    return x + 1


def down(x):
    return x - 1


chosen = up
five, seven = (lambda n: n + 5), (lambda n: n + 7)
size = five


def calls_what_is_chosen(k, x):
    return size(chosen(x))


rounding, twice, other, third = math.floor, up, down, up
flag, table, second_table = object(), {"a": 1}, {"a": 1}


def rounds(k, x):
    return rounding(x)


def calls_three(k, x):
    return twice(x), other(x), third(x)


def tells_them_apart(k, x):
    return rounding is flag


def reads_two_dicts(k, x):
    return table is second_table


def with_keywords(k, x, *, a=1, b=2):
    return a - b


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        (plain, "SIZES", (1, 3)),
        (calls_what_is_chosen, "chosen", down),
        (calls_what_is_chosen, "size", seven),
        (rounds, "rounding", math.ceil),
        (rounds, "rounding", operator.neg),
        (rounds, "rounding", functools.partial(math.floor)),
        (rounds, "rounding", ValueError),
        (calls_three, "third", down),  # which is followed already
        (tells_them_apart, "rounding", flag),
        (reads_two_dicts, "second_table", table),
    ],
)
def test_what_a_name_means_is_part_of_the_identity(monkeypatch, function, name, value):
    before = Scope([function]).identity
    assert Scope([function]).identity == before
    monkeypatch.setitem(globals(), name, value)
    assert Scope([function]).identity != before


def test_a_name_that_is_gone_is_part_of_the_identity(monkeypatch):
    before = Scope([rounds]).identity
    monkeypatch.delitem(globals(), "rounding")
    assert Scope([rounds]).identity != before


def test_which_keyword_has_which_default_is_part_of_the_identity(monkeypatch):
    before = Scope([with_keywords]).identity
    monkeypatch.setattr(with_keywords, "__kwdefaults__", {"b": 1, "a": 2})
    assert Scope([with_keywords]).identity != before


@pytest.mark.long
def test_where_a_name_means_another_function_records_differ(run_python, tmp_path):
    package = rounding_package(tmp_path)
    code = package + "y = rounds.op(torch.zeros(1), 2.5)\nspecializer.settle()\nprint(y.item())"
    for rounding, expected in (("floor", "2.0"), ("ceil", "3.0"), ("floor", "2.0")):
        for _ in range(2):
            done = run_python(code, ROUNDING=rounding)
            assert done.stdout.strip() == expected, done.stderr


@pytest.mark.long
def test_calls_after_an_export_are_served(run_python, tmp_path):
    """While torch.export runs the op's fake, `min` is another object."""
    code = rounding_package(tmp_path) + (
        "class Module(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return rounds.op(x, 2.5)\n"
        "torch.export.export(Module(), (torch.zeros(1),))\n"
        "for _ in range(2): y = rounds.op(torch.zeros(1), 2.5); specializer.settle()\n"
        "slot = rounds.op.programs['cpu']\n"
        "print(y.item(), len(slot.known), slot.refused)"
    )
    done = run_python(code, ROUNDING="floor")
    assert done.stdout.strip() == "2.0 1 {}", done.stderr


def rounding_package(folder):
    """Write an op whose kernel gets a number from the function of `math` that $ROUNDING names."""
    (folder / "fill.cpp").write_text(
        'extern "C" void fill(T *y, long n, long v) { for (long i = 0; i < n; i++) y[i] = v; }'
    )
    (folder / "rounds.py").write_text(
        "import math, os, torch\n"
        "from jitkern.declare import Cpp, kernel\n"
        "rounding = getattr(math, os.environ['ROUNDING'])\n"
        "op = kernel('test::rounds(Tensor x, float f) -> Tensor', cpu=Cpp('fill.cpp'))\n"
        "@op.launch('cpu')\n"
        "def _(k, x, f):\n"
        "    y = torch.empty_like(x)\n"
        "    k.fill[{'T': x.dtype}](y, x.numel(), min(9, rounding(f)))\n"
        "    return y\n"
    )
    return (
        f"import sys; sys.path.insert(0, {str(folder)!r})\n"
        "import torch, rounds\nfrom jitkern.runtime import specializer\n"
    )


def reads_a_device_index(k, x):
    return x.device.index


def test_a_function_that_asks_for_a_device_has_records_of_each():
    scope = Scope([reads_a_device_index])
    keys = [
        class_of_calls(reads_a_device_index, device=f"cuda:{index}").key(scope) for index in (0, 1)
    ]
    assert keys[0].digest != keys[1].digest


@pytest.mark.parametrize("native", [{"native": True}, {"flags": ("-march=native",)}])
def test_a_native_kernel_serves_its_instruction_set_alone(op, monkeypatch, native):
    source = op.sources["cpu"][0].replace(**native)
    keys = []
    for level in ("_v2", "_v4"):
        monkeypatch.setattr(target_module, "isa_level", lambda level=level: level)
        testing.set_processor(monkeypatch, level)
        keys.append(class_of_calls(plain, source).key(Scope([plain])).digest)
    assert keys[0] != keys[1]


def test_shipped_launch_functions_have_records():
    import jitkern.ops  # noqa: F401

    for name, op in all_ops().items():
        if name.startswith("jitkern::"):
            assert all(map(identity_of, op.declaration.launchers.values())), name


def test_a_class_is_dtypes_ranks_and_what_is_none():
    args = (torch.ones(2, 3), None, True, 5, 0.5, torch.zeros(1, dtype=torch.int64))
    assert signature.class_of(args) == ("f32[2]", "None", "True", "int", "float", "i64[1]")


@pytest.fixture
def declared(tmp_path):
    """A fresh op with this launch function."""

    def make(function):
        (tmp_path / "k.cpp").write_text(
            'extern "C" void f(float* y, long n, long m) { for (long i = 0; i < n - 1; i++) y[i] = m; }'
        )
        made = kernel(
            f"jitkern_plan::f{next(_number)}(Tensor x, int n=2) -> Tensor",
            cpu=Cpp(str(tmp_path / "k.cpp")),
        )
        made.launch("cpu")(function)
        made.samples(lambda device: iter([torch.ones(3, device=device)]))
        return made

    return make


@pytest.fixture
def op(declared):
    return declared(plain)


def kept(op):
    """The records for calls with a vector."""
    calls = class_of_calls(plain, op.sources["cpu"][0], op=op.signature)
    return records.found(calls, Scope([plain]), "", records.reader())


@pytest.mark.long
def test_a_record_is_kept_once(op):
    for _ in range(3):
        op(X, 2)
        specializer.settle()
    assert len(kept(op)) == 1


@pytest.mark.long
def test_kernels_and_records_all_count_towards_the_limits(op, cache_dir, monkeypatch):
    published = []
    monkeypatch.setattr(eviction, "after_publish", lambda _, size, **limits: published.append(size))
    op(X, 2)
    specializer.settle()
    assert kept(op)
    assert sum(published) == sum(use.bytes for use in eviction.uses(Cache(cache_dir)))


@pytest.mark.long
def test_each_branch_has_a_record(op):
    for n in (2, 0, 2):
        op(X, n)
        specializer.settle()
    assert len(kept(op)) == 2


@pytest.mark.long
def test_branches_that_were_met_apart_are_a_whole_together(op, tmp_path, cache_dir):
    roots = []
    for n in (2, 0):
        roots.append(tmp_path / f"apart{n}")
        with config.using(cache_dir=roots[-1]):
            op(X, n)
            specializer.settle()
            assert len(kept(op)) == 1
    with config.using(cache_dir=tmp_path / "empty", system_cache=tuple(roots)):
        assert len(kept(op)) == 2


@pytest.mark.long
def test_a_record_that_is_gone_takes_no_other_with_it(op):
    for n in (2, 0):
        op(X, n)
        specializer.settle()
    gone, left = kept(op)
    jit.open_cache().remove(gone.entry.path)
    assert kept(op) == [left]


@pytest.mark.long
def test_prewarm_and_a_call_leave_the_same_record(op):
    op(X, 2)
    (known,) = kept(op)
    source = op.sources["cpu"][0]
    (one,) = call_traces.traces_of(op, source, Target.current("cpu"), [(X, 2)], {}).traces
    assert records.keep(one.calls, one.trace, records.reader()) == (known[0], False)


@pytest.mark.long
def test_a_callback_may_call_the_op_it_is_told_of(run_python):
    code = (
        "import torch, jitkern, jitkern.ops\n"
        "told = []\n"
        "def callback(event):\n"
        "    told.append(event)\n"
        "    if len(told) < 3: jitkern.ops.vec_add(torch.ones(2), torch.ones(2))\n"
        "jitkern.on_compile(callback)\n"
        "print(jitkern.ops.vec_add(torch.ones(3), torch.ones(3)).tolist())"
    )
    for _ in range(3):
        done = run_python(code)
        assert done.stdout == "[2.0, 2.0, 2.0]\n", done.stderr


@pytest.mark.long
def test_a_name_that_changes_early_condemns_no_class(op, monkeypatch):
    slot, trace = programs_of(op), specializer.trace

    def trace_early(*rest):
        traced = trace(*rest)
        monkeypatch.setattr(sys.modules[__name__], "SIZES", (1, 4))
        return traced

    monkeypatch.setattr(specializer, "trace", trace_early)
    op(X, 2)
    assert SIZES == (1, 4) and not slot.refused
    monkeypatch.setattr(specializer, "trace", trace)
    served(op, X, 2)


@pytest.mark.long
def test_a_name_that_always_changes_is_looked_up_ever_less(op, monkeypatch):
    looked_up = []
    find = records.found
    monkeypatch.setattr(records, "found", lambda *of: looked_up.append(of) or find(*of))
    for number in range(400):
        monkeypatch.setattr(sys.modules[__name__], "SIZES", (1, number))
        op(X, 2)
    specializer.settle()
    assert 16 < len(looked_up) < 80
    for _ in range(300):
        op(X, 2)
    served(op, X, 2)
