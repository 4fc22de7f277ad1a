"""A tensor that lies apart reaches a kernel only where the launch function asked for its strides."""

import itertools
import json
import re

import pytest
import torch
from helpers import served
from tuning import ways

from jitkern.declare import Cpp, Cuda, Extension, Triton, kernel
from jitkern.devtools import check
from jitkern.errors import DeclarationError, LaunchError
from jitkern.jit import key_of
from jitkern.launch.runner import Runner
from jitkern.runtime import binding, specializer
from jitkern.runtime.freshness import declaration_of
from jitkern.source.kinds import Variant
from jitkern.target import Target
from jitkern.trace.trace import trace

SOURCE = """
template <typename T> void copy(T* out, const T* x, long n) { for (long i = 0; i < n; i++) out[i] = x[i]; }
template <typename T> void dot(T* out, const T* x, const T* w, long rows, long n, long s0, long s1) {
  for (long i = 0; i < rows; i++)
    for (long j = out[i] = 0; j < n; j++) out[i] += x[i * s0 + j * s1] * w[j];
}
"""
_number = itertools.count()
X = torch.arange(24.0).view(4, 6)
APART = {
    "transposed": X.T,
    "sliced": X[:, ::2],
    "rows of more": X[:, :3],
    "expanded": X[:1].expand(4, 6),
    "reversed dims": X.view(2, 2, 6).permute(2, 1, 0),
    "channels last": X.view(1, 4, 3, 2).contiguous(memory_format=torch.channels_last),
}
SIDE_BY_SIDE = {
    "offset": X.view(-1)[5:],
    "rows": X[1:3],
    "size 1": X[:1].T.unsqueeze(0)[:, :1],
    "empty": X[:0].T,
    "a scalar": X[2, 3],
}


@pytest.fixture
def op(tmp_path):
    """An op with this launch function, and what its calls do in Python, and then in C."""

    def op(launch, schema="(Tensor x) -> Tensor", reference=torch.clone, **options):
        file = tmp_path / "k.cpp"
        file.write_text(SOURCE)
        new = kernel(f"jitkern_strides::f{next(_number)}{schema}", cpu=Cpp(str(file), **options))
        new.launch("cpu")(launch)
        new.reference(reference)
        return new

    return op


def bare(k, x):
    out = torch.empty(x.shape, dtype=x.dtype)
    k.copy[{"T": x.dtype}](out, x, x.numel())
    return out


def alike(k, x):
    out = torch.empty_like(x)
    k.copy[{"T": x.dtype}](out, x, x.numel())
    return out


def untraced(k, x):
    out = torch.zeros(x.shape).abs()
    k.copy[{"T": x.dtype}](out, x, x.numel())
    return out


def careful(k, x):
    x = x.contiguous()
    return alike(k, x)


def rows_of(k, x, w):
    out = torch.empty(x.shape[:1], dtype=x.dtype)
    k.dot[{"T": x.dtype}](out, x, w, *x.shape, *x.stride())
    return out


def refused(op, *args, what="not contiguous"):
    """Assert that calls are refused, whether Python or C sees them first."""
    for _ in range(2):
        with pytest.raises(LaunchError, match=what):
            op(*args)
        specializer.settle()


@pytest.mark.parametrize("launch", [bare, alike, untraced])
def test_a_tensor_of_which_nobody_asked_is_refused(op, launch):
    naive = op(launch)
    refused(naive, X.T)
    for x in APART.values():
        for _ in range(2):  # a call that a program serves, then one that its guards must refuse
            assert torch.equal(naive(x.contiguous()), x)
            specializer.settle()
        refused(naive, x)


@pytest.mark.parametrize("launch", [bare, alike])
def test_what_is_contiguous_for_torch_is_passed(op, launch):
    naive = op(launch)
    for x in SIDE_BY_SIDE.values():
        assert torch.equal(served(naive, x), x)


def test_a_copy_is_right(op):
    mine = op(careful)
    for x in APART.values():
        assert torch.equal(served(mine, x), x)
        assert torch.equal(served(mine, X), X)


def test_a_program_looks_once_at_each_tensor(op):
    for launch in (bare, alike, careful):
        mine = op(launch)
        runner = Runner(mine.name, mine.sources["cpu"][0], Target.current("cpu"), X.device)
        traced = trace(mine.signature, launch, [X], frozenset(), X.device, runner)
        assert [step.name for step in traced.steps].count("CONTIGUOUS") == 1


def test_a_kernel_that_takes_any_strides_gets_them(op):
    free = op(bare, strided=True)
    for x in APART.values():
        first = x.as_strided((x.numel(),), (1,))  # what this kernel reads, which asks for none
        for each in (x, first):
            assert torch.equal(served(free, each).view(-1), first)


def test_a_question_is_about_one_tensor(op):
    matvec = op(rows_of, "(Tensor x, Tensor w) -> Tensor", torch.mv)
    apart = torch.arange(12.0)[::2]
    for x in (X, X.T[:, :3], X[:, ::2], X[:1].expand(4, 6)):
        w = torch.arange(float(x.shape[1]))
        assert torch.equal(served(matvec, x, w), x @ w)
        for y in (apart[: x.shape[1]], apart[:1].expand(x.shape[1])):
            refused(
                matvec, x, y, what=r"argument 3 \(`const T\* w`\) is not contiguous, with shape "
            )
    refused(matvec, X, apart, what=r"`dot` of jitkern_strides::.* shape \[6\] and strides \[2\]")


@pytest.mark.parametrize(
    ("view", "contiguous"),
    [
        (lambda x: x.unsqueeze(0)[:, 1:3], True),
        (lambda x: x[:, 1:], False),
        (lambda x: x.unsqueeze(0).expand(2, 4, 6), False),
    ],
    ids=["rows", "columns", "broadcast"],
)
def test_a_view_of_which_nobody_asked_is_contiguous(op, view, contiguous):
    def launch(k, x):
        return bare(k, view(x.contiguous()))

    mine = op(launch, reference=lambda x: view(x).clone())
    if contiguous:
        assert torch.equal(served(mine, X), view(X))
    else:
        refused(mine, X)


def test_views_of_a_tensor_that_was_asked_about_are_passed(op):
    def halves(k, x, w):
        return rows_of(k, x[:, : w.shape[0]], w)

    mine = op(halves, "(Tensor x, Tensor w) -> Tensor", lambda x, w: x[:, : w.shape[0]] @ w)
    for x in (X, X.T.contiguous().T, X[::2]):
        assert torch.equal(served(mine, x, X[0, :3]), x[:, :3] @ X[0, :3])


def test_new_memory_like_a_tensor_counts_as_that_tensor(op):
    def doubles(k, x, w):
        wide = x.to(torch.float64)
        out = torch.empty(wide.shape, dtype=wide.dtype)
        w.stride()
        k.copy[{"T": wide.dtype}](out, wide, wide.numel())
        return out

    mine = op(doubles, "(Tensor x, Tensor w) -> Tensor", lambda x, w: x.double())
    assert torch.equal(served(mine, X, X), X.double())
    refused(mine, X.T, X)
    refused(mine, X.T, X.T)


def test_an_argument_to_change_is_refused_unchanged(op):
    def fill_(k, out, x):
        k.copy[{"T": x.dtype}](out, x, x.numel())

    fill_ = op(fill_, "(Tensor(a!) out, Tensor x) -> ()", lambda out, x: out.copy_(x))
    memory = torch.zeros(4, 12)
    refused(
        fill_, memory[:, ::2], X, what=r"argument 1 .*of a tensor that the kernel changes, check"
    )
    assert not memory.any()
    out = torch.zeros(5, 6)
    served(fill_, out[1:], X)
    assert torch.equal(out[1:], X)
    refused(fill_, memory[:, ::2], X)


def test_tensors_of_a_list_are_held_to_it(op):
    def first(k, xs):
        return bare(k, xs[0])

    mine = op(first, "(Tensor[] xs) -> Tensor", lambda xs: xs[0].clone())
    assert torch.equal(served(mine, [X, X.T]), X)
    refused(mine, [X.T, X])


def test_a_gradient_that_is_expanded_is_refused(op):
    mine, backward = op(careful), op(bare, "(Tensor grad) -> Tensor")
    mine.backward(backward)
    x = X.clone().requires_grad_()
    for _ in range(2):
        with pytest.raises(LaunchError, match=r"shape \[4, 6\] and strides \[0, 0\]"):
            mine(x).sum().backward()
        specializer.settle()
    mine(x).backward(X)
    assert torch.equal(x.grad, X)


@pytest.mark.long
def test_compiled_calls_are_held_to_it(op):
    torch._dynamo.reset()
    mine = op(bare)
    compiled = torch.compile(lambda x: mine(x) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X), X + 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="is not contiguous, with shape"):
            compiled(X.T)
        specializer.settle()
    assert torch.equal(compiled(X), X + 1)


CALL = """
import json, sys, torch, jitkern, strided_op
try:
    answer = strided_op.op({x}).tolist()
except jitkern.LaunchError as e:
    answer = str(e)
by_record = "jitkern.op.dispatch" not in sys.modules
jitkern.runtime.specializer.settle()
print(json.dumps([answer, by_record]))
"""
PACKAGE = """
import torch
from jitkern.declare import Cpp, kernel
op = kernel("jitkern_strides_record::op(Tensor x) -> Tensor", cpu=Cpp(text={text!r}{more}))
@op.launch("cpu")
def _(k, x):
    out = torch.empty(x.shape)
    k.copy[{{"T": x.dtype}}](out, x, x.numel())
    return out
"""


@pytest.mark.long
@pytest.mark.skipif(not binding.runtime(), reason="no launch runtime on this platform")
def test_a_process_that_finds_a_record_is_held_to_it(tmp_path, run_python):
    def call(x):
        done = run_python(CALL.format(x=x), PYTHONPATH=str(tmp_path))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    module = tmp_path / "strided_op.py"
    module.write_text(PACKAGE.format(text=SOURCE, more=""))
    plain, apart = "torch.ones(2, 3)", "torch.arange(6.).view(3, 2).T"
    assert [call(plain)[1] for _ in range(2)] == [False, True]
    answer, by_record = call(apart)
    assert "is not contiguous" in answer and not by_record
    module.write_text(PACKAGE.format(text=SOURCE, more=", strided=True"))
    assert call(apart) == [[[0, 1, 2], [3, 4, 5]], False]  # as they lie: the program is another one
    assert call(apart)[1]


def test_measuring_configurations_is_held_to_it(declare, clock):
    def doubled(k, x):
        y = torch.empty(x.shape)
        k.scale[{"T": x.dtype, "WAY": k.config["WAY"]}](y, x, 2.0, x.numel())
        return y

    mine = declare(doubled, ways)
    refused(mine, torch.ones(4, 2)[:, 0])
    assert clock.measured == []
    assert torch.equal(mine(torch.ones(4)), torch.full((4,), 2.0))


def test_strided_is_no_part_of_a_kernel(tmp_path):
    (tmp_path / "k.cpp").write_text(SOURCE)
    sources = [Cpp("k.cpp", folder=str(tmp_path), strided=strided) for strided in (False, True)]
    assert sources[0] != sources[1]
    template = (("T", "f32"),)
    keys = {
        key_of(Variant("test::k", s, "copy", template), Target.current("cpu")).digest
        for s in sources
    }
    assert len(keys) == 1
    assert len({*map(declaration_of, sources)}) == 2  # for launch records
    Cuda("k.cu", strided=True), Triton("k.py", strided=True)
    with pytest.raises(DeclarationError, match="strided=True.*no Extension"):
        Extension("k.cpp", function="f", strided=True)
    with pytest.raises(DeclarationError, match="strided='yes'"):
        Cpp("k.cpp", strided="yes")


def checked(op, launch, **options):
    """What `jitkern check` finds about an op with this launch function and one sample."""
    mine = op(launch, "(Tensor x, Tensor w) -> Tensor", torch.mv, **options)
    mine.samples(lambda _: [(X, X[0])])
    return next(iter(check.checks_of(mine, ["cpu"])))


@pytest.mark.long
def test_check_finds_a_kernel_that_reads_other_elements(op):
    def asks_in_vain(k, x, w):
        x.stride(), w.stride()
        out = torch.empty(x.shape[:1])
        k.dot[{"T": x.dtype}](out, x, w, *x.shape, x.stride(0), 1)
        return out

    for launch, options in ((asks_in_vain, {}), (rows_of, {"strided": True})):
        row = checked(op, launch, **options)
        wrong = (
            r"`x` transposed, with strides \[1, 4\]"
            if not options
            else r"`w` sliced, with strides \[2\]"
        )
        assert row.ok is False
        assert re.match(
            wrong + r", \(float32\[4, 6\], float32\[6\]\): out\[\d\]: got ", row.note
        ), row


def test_check_tells_what_an_op_refuses(op):
    row = checked(op, rows_of)
    assert row.ok
    assert row.note.splitlines() == [
        "1 sample, max error 0.00 eps; refused: `w` sliced, `w` expanded",
        "and 7 calls with another layout of a tensor",
    ]
