"""A kernel takes contiguous tensors, unless its source is declared with `strided=True`."""

import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import H100, needs_runtime, served
from tuning import op_of, ways

import jitkern
from jitkern.declare import Cpp, Cuda, Extension, Triton, kernel
from jitkern.devtools import check
from jitkern.errors import DeclarationError, LaunchError
from jitkern.jit import key_of
from jitkern.launch.runner import Runner
from jitkern.op.needed_kernels import needs_of
from jitkern.runtime import specializer
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
    "rows of more, from inside": X[1:, 1:],
    "expanded": X[:1].expand(4, 6),
    "expanded inside": X.unsqueeze(1).expand(4, 3, 6),
    "reversed dims": X.view(2, 2, 6).permute(2, 1, 0),
    "channels last": X.view(1, 4, 3, 2).contiguous(memory_format=torch.channels_last),
    "a diagonal": X.diagonal(),
}
SIDE_BY_SIDE = {
    "offset": X.view(-1)[5:],
    "rows": X[1:3],
    "size 1": X[:1].T.unsqueeze(0)[:, :1],
    "size 1 of any stride": X.as_strided((4, 1, 6), (6, 77, 1)),
    "one number": X[1:2, 1:2],
    "empty": X[:0].T,
    "empty, expanded": X[:0, :1].expand(0, 5),
    "a scalar": X[2, 3],
}


def op(launch, schema="(Tensor x) -> Tensor", reference=torch.clone, **options):
    """An op with this launch function."""
    new = op_of(Cpp(text=SOURCE, **options), launch, schema=schema)
    new.reference(reference)
    return new


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
def test_a_tensor_that_is_not_contiguous_is_refused(launch):
    naive = op(launch)
    refused(naive, X.T)
    for x in APART.values():
        for _ in range(2):  # a call that a program serves, then one that its guards must refuse
            assert torch.equal(naive(x.contiguous()), x)
            specializer.settle()
        refused(naive, x)


def test_the_error_says_what_to_write():
    naive = op(bare)
    with pytest.raises(LaunchError) as raised:
        naive(X.T)
    place = f"{bare.__code__.co_filename}:{bare.__code__.co_firstlineno + 2}: "
    assert str(raised.value) == (
        f"{place}`copy` of {naive.name} for {Target.current('cpu')}: argument 2 (`const T* x`) is "
        "not contiguous, with shape [6, 4] and strides [1, 6], and the kernel would take other "
        "elements: write `x = x.contiguous()` in the launch function (for a tensor that the kernel "
        "changes: `torch._check(x.is_contiguous())`), or `Cpp(..., strided=True)` if the kernels "
        "take any strides"
    )


@pytest.mark.parametrize("launch", [bare, alike])
def test_what_is_contiguous_for_torch_is_passed(launch):
    naive = op(launch)
    for x in SIDE_BY_SIDE.values():
        assert torch.equal(served(naive, x), x)


def test_a_copy_is_right():
    mine = op(careful)
    for x in APART.values():
        assert torch.equal(served(mine, x), x)
        assert torch.equal(served(mine, X), X)


def test_a_program_looks_once_at_each_tensor():
    for launch in (bare, alike, careful):
        mine = op(launch)
        runner = Runner(mine.name, mine.sources["cpu"][0], Target.current("cpu"), X.device)
        traced = trace(mine.signature, launch, [X], frozenset(), X.device, runner)
        assert [step.name for step in traced.steps].count("CONTIGUOUS") == 1


QUESTIONS = {
    "stride": lambda x: x.stride(),
    "is_contiguous": lambda x: x.is_contiguous() or x.stride(0),
    "by the class": lambda x: torch.Tensor.stride(x, 0),
    "in a thread": lambda x: ThreadPoolExecutor(1).submit(x.is_contiguous).result(),
    "in C++": lambda x: x.numpy().strides,
}
VIEWS = {
    "view": lambda x: x.view(x.shape),
    "narrow": lambda x: torch.narrow(x, 0, 0, x.shape[0]),
    "narrow by keyword": lambda x: torch.narrow(input=x, dim=0, start=0, length=x.shape[0]),
    "slice": lambda x: x[:],
    "unsqueeze": lambda x: x.unsqueeze(0)[0],
    "transpose by keyword": lambda x: torch.transpose(input=x.T, dim0=0, dim1=1),
    "clone": lambda x: x.clone(),
    "clone by keyword": lambda x: torch.clone(input=x),
    "empty_like by keyword": lambda x: torch.empty_like(input=x).copy_(x),
    "add by keyword": lambda x: torch.add(input=x, other=0),
    "to": lambda x: x.to(torch.float64),
}


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS)
def test_a_question_about_strides_changes_nothing(ask):
    def launch(k, x):
        ask(x)
        return bare(k, x)

    mine = op(launch)
    for _ in range(3):
        assert torch.equal(mine(X), X)
        specializer.settle()
        refused(mine, X.T)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_and_new_memory_are_held_to_it(view):
    def launch(k, x):
        x.is_contiguous(), x.stride()
        return bare(k, view(x))

    mine = op(launch, reference=lambda x: view(x).clone())
    for _ in range(3):
        assert torch.equal(mine(X), X)
        specializer.settle()
        refused(mine, X.T)


@pytest.mark.parametrize(
    ("view", "contiguous"),
    [
        (lambda x: x.unsqueeze(0)[:, 1:3], True),
        (lambda x: x[:, 1:], False),
        (lambda x: x.unsqueeze(0).expand(2, 4, 6), False),
        (lambda x: x.t(), False),
    ],
    ids=["rows", "columns", "broadcast", "transposed"],
)
def test_a_view_of_a_contiguous_tensor_is_held_to_it(view, contiguous):
    def launch(k, x):
        return bare(k, view(x.contiguous()))

    mine = op(launch, reference=lambda x: view(x).clone())
    if contiguous:
        assert torch.equal(served(mine, X), view(X))
    else:
        refused(mine, X)


def test_each_argument_is_looked_at():
    matvec = op(rows_of, "(Tensor x, Tensor w) -> Tensor", torch.mv)
    apart = torch.arange(12.0)[::2]
    assert torch.equal(served(matvec, X, X[0]), X @ X[0])
    for w in (apart, apart[:1].expand(6)):
        refused(matvec, X, w, what=r"argument 3 \(`const T\* w`\) is not contiguous, with shape ")
    refused(matvec, X.T[:, :3], X[0, :3], what=r"argument 2 \(`const T\* x`\)")


def test_a_kernel_that_takes_any_strides_gets_them():
    free = op(bare, strided=True)
    for x in APART.values():
        if x.numel() <= X.numel():  # more would be read than there is
            first = x.as_strided((x.numel(),), (1,))  # what this kernel reads, which asks for none
            for each in (x, first):
                assert torch.equal(served(free, each).view(-1), first)


def test_a_kernel_that_walks_over_strides_is_right():
    def launch(k, x, w):
        return rows_of(k, x[:, : w.shape[0]], w.contiguous())

    reference = lambda x, w: x[:, : w.shape[0]] @ w
    matvec = op(launch, "(Tensor x, Tensor w) -> Tensor", reference, strided=True)
    apart = torch.arange(12.0)[::2]
    for x in (X, X.T, X[:, ::2], X[:1].expand(4, 6), X[1:, 1:]):
        for w in (apart[:3], apart[:1].expand(2), X[0, :2]):
            assert torch.equal(served(matvec, x, w), x[:, : len(w)] @ w)


def test_an_argument_to_change_is_refused_unchanged():
    def fill_(k, out, x):
        k.copy[{"T": x.dtype}](out, x, x.numel())

    fill_ = op(fill_, "(Tensor(a!) out, Tensor x) -> ()", lambda out, x: out.copy_(x))
    memory = torch.zeros(4, 12)
    refused(fill_, memory[:, ::2], X, what=r"argument 1 .*for a tensor that the kernel changes: ")
    assert not memory.any()
    out = torch.zeros(5, 6)
    served(fill_, out[1:], X)
    assert torch.equal(out[1:], X)
    refused(fill_, memory[:, ::2], X)


def test_tensors_of_a_list_are_held_to_it():
    def first(k, xs):
        return bare(k, xs[0])

    mine = op(first, "(Tensor[] xs) -> Tensor", lambda xs: xs[0].clone())
    assert torch.equal(served(mine, [X, X.T]), X)
    refused(mine, [X.T, X])


def test_a_gradient_that_is_expanded_is_refused():
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
def test_compiled_calls_are_held_to_it():
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
by_record = "jitkern.launch.runner" not in sys.modules
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
@needs_runtime
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


CUDA_TEXT = 'extern "C" __global__ void copy(float* out, const float* x, long long n) {}'
TRITON_TEXT = "import triton\n\n@triton.jit\ndef copy(out, x, n):\n    pass\n"


@pytest.mark.parametrize(
    ("kind", "file", "text", "parameter"),
    [(Cuda, "k.cu", CUDA_TEXT, "const float* x"), (Triton, "k_triton.py", TRITON_TEXT, "x")],
    ids=["cuda", "triton"],
)
def test_meta_tensors_of_a_prewarm_are_held_to_it(tmp_path, kind, file, text, parameter):
    (tmp_path / file).write_text(text)
    target = Target.parse(H100)

    def copied(k, x):
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        keywords = {"block": 32} if kind is Cuda else {}
        k.copy(out, x, x.numel(), grid=1, **keywords)
        return out

    def needs(x, **options):
        name = f"jitkern_strides::f{next(_number)}"
        mine = kernel(f"{name}(Tensor x) -> Tensor", cuda=kind(str(tmp_path / file), **options))
        mine.launch("cuda")(copied)
        mine.samples(lambda device: [torch.empty_strided(x.shape, x.stride(), device=device)])
        assert mine(x.to("meta")).is_contiguous()  # the fake, which launches nothing
        return name, needs_of(mine, mine.sources["cuda"][0], "cuda", target)

    for x in (X, *SIDE_BY_SIDE.values()):
        _, found = needs(x)
        assert len(found.variants) == 1 and not found.problems
    for x in APART.values():
        name, found = needs(x)
        assert not found.variants
        (problem,) = found.problems
        says = f"`copy` of {name}: argument 2 (`{parameter}`) is not contiguous, with shape"
        assert says in problem and f"`{kind.__name__}(..., strided=True)`" in problem, problem
        assert len(needs(x, strided=True)[1].variants) == 1


def test_a_kernel_without_an_op_gets_what_it_is_called_with():
    copy = jitkern.cpp_kernel(text=SOURCE, name="copy")[{"T": torch.float32}]
    for x in (X, X.T):
        out = torch.empty(24)
        copy(out, x, 24)
        assert torch.equal(out, X.view(-1))


def test_strided_is_no_part_of_a_kernel(tmp_path):
    (tmp_path / "k.cpp").write_text(SOURCE)
    sources = [Cpp("k.cpp", folder=str(tmp_path), strided=strided) for strided in (False, True)]
    assert sources[0] != sources[1]
    variants = [Variant("test::k", source, "copy", (("T", "f32"),)) for source in sources]
    assert len({key_of(variant, Target.current("cpu")).digest for variant in variants}) == 1
    assert len({*map(declaration_of, sources)}) == 2  # for launch records
    Cuda("k.cu", strided=True), Triton("k.py", strided=True)
    with pytest.raises(DeclarationError, match="strided=True.*no Extension"):
        Extension("k.cpp", function="f", strided=True)
    with pytest.raises(DeclarationError, match="strided='yes'"):
        Cpp("k.cpp", strided="yes")


def checked(launch, **options):
    """What `jitkern check` finds about an op with this launch function and one sample."""
    mine = op(launch, "(Tensor x, Tensor w) -> Tensor", torch.mv, **options)
    mine.samples(lambda _: [(X, X[0])])
    return next(iter(check.checks_of(mine, ["cpu"])))


@pytest.mark.long
def test_check_finds_a_kernel_that_reads_other_elements():
    def one_stride(k, x, w):
        out, w = torch.empty(x.shape[:1]), w.contiguous()
        k.dot[{"T": x.dtype}](out, x, w, *x.shape, x.stride(0), 1)
        return out

    for launch, what in (
        (one_stride, r"`x` transposed, with strides \[1, 4\]"),
        (rows_of, r"`w` sliced, with strides \[2\]"),
    ):
        row = checked(launch, strided=True)
        assert row.ok is False
        says = what + r", \(float32\[4, 6\], float32\[6\]\): out\[\d\]: got "
        assert re.match(says, row.note), row


def test_check_fails_for_a_layout_that_no_kernel_takes():
    row = checked(rows_of)
    assert row.ok is False
    assert row.note.startswith("`x` transposed, with strides [1, 4]: ")
    assert "`dot` of jitkern_launch::" in row.note
    assert "write `x = x.contiguous()` in the launch function" in row.note


@pytest.mark.long
def test_check_tells_what_an_author_refuses():
    def launch(k, x, w):
        torch._check(w.is_contiguous(), lambda: "w must be contiguous")
        return rows_of(k, x, w)

    row = checked(launch, strided=True)
    assert row.ok
    assert row.note.splitlines() == [
        "1 sample, max error 0.00 eps; refused: `w` sliced, `w` expanded",
        "and 7 calls with another layout of a tensor",
    ]
