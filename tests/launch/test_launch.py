"""Launch functions run in Python, with the real C compiler underneath."""

import dataclasses
import sys

import pytest
import torch
from helpers import H100

from jitkern.calls.signature import Signature
from jitkern.errors import CompileError, LaunchError
from jitkern.launch.call import Call, variant_of
from jitkern.launch.kernels import Kernels, ignore
from jitkern.launch.runner import Runner
from jitkern.launch.tuned import Tuned, Tuning
from jitkern.source.kinds import Cpp, Cuda, Triton
from jitkern.target import Target
from jitkern.trace.fast_check import with_fast_check

CPU = torch.device("cpu")
FILL = 'extern "C" void fill(T* x, long n, T value) { for (long i = 0; i < n; i++) x[i] = value; }'


@pytest.fixture
def kernels(tmp_path):
    folder = tmp_path / "k"
    folder.mkdir()
    (folder / "k.cpp").write_text(FILL)
    return Kernels(Runner("test::k", Cpp("k.cpp", folder=str(folder)), Target.current("cpu"), CPU))


def test_a_launch_runs_the_kernel(kernels):
    x = torch.zeros(5)
    kernels.fill[{"T": x.dtype}](x, 3, 7.0)
    assert x.tolist() == [7, 7, 7, 0, 0]
    assert kernels.launched == 1


def test_each_template_argument_is_a_variant(kernels):
    x, y = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    kernels.fill[{"T": x.dtype}](x, 2, 1.5)
    kernels.fill[{"T": y.dtype}](y, 2, 2**40)
    assert (x.tolist(), y.tolist()) == ([1.5, 1.5], [2**40, 2**40])


def test_wrong_arguments_never_reach_the_kernel(kernels):
    x = torch.zeros(2)
    with pytest.raises(LaunchError, match=r"`fill` of test::k for cpu-.* takes 3 arguments"):
        kernels.fill[{"T": x.dtype}](x)
    with pytest.raises(LaunchError, match=r"argument 1 \(`T\* .*`\) must be a float32 tensor"):
        kernels.fill[{"T": x.dtype}](x.double(), 2, 1.0)
    assert kernels.launched == 0


@pytest.mark.parametrize("lazy", ["negative", "zero"])
def test_a_tensor_with_other_values_in_memory_is_copied_first(kernels, lazy):
    z = torch.tensor([1 + 2j]).conj()
    x = z.imag if lazy == "negative" else torch._efficientzerotensor(1)
    with pytest.raises(LaunchError, match="memory of a tensor does not hold its values"):
        kernels.fill[{"T": x.dtype}](x, 1, 1.0)
    assert kernels.launched == 0


def test_equal_template_values_of_other_types_are_other_variants(tmp_path):
    (tmp_path / "k.cpp").write_text('extern "C" void half(double* x) { *x = A / 2; }')
    source = Cpp("k.cpp", folder=str(tmp_path))
    k = Kernels(Runner("test::k", source, Target.current("cpu"), CPU))
    x = torch.zeros(1, dtype=torch.float64)
    k.half[{"A": 1}](x)
    assert x.item() == 0
    k.half[{"A": 1.0}](x)
    assert x.item() == 0.5


def test_an_unknown_keyword_is_refused(kernels):
    with pytest.raises(LaunchError, match="unknown keyword `gird`"):
        kernels.fill(1, gird=1)


@pytest.mark.parametrize("grid", [(1,), 1, lambda meta: (1,), torch.float32])
def test_a_grid_in_the_place_of_template_arguments_is_refused(kernels, grid):
    says = r"takes template arguments by name.*`k.fill\(…, grid=…\)`"
    with pytest.raises(LaunchError, match=says):
        kernels.fill[grid](torch.zeros(1), 1, 1.0)


@pytest.mark.parametrize(
    ("value", "remedy"),
    [("f32", ": write a dtype like torch.float32$"), (object(), "$"), (float("nan"), "$")],
)
def test_a_wrong_template_argument_is_refused(kernels, value, remedy):
    says = f"template argument T=.* must be a dtype, bool, int or finite float{remedy}"
    with pytest.raises(LaunchError, match=says):
        kernels.fill[{"T": value}](torch.zeros(1), 1, 1.0)


def test_a_fake_launches_nothing():
    k = Kernels(ignore)
    k.anything[{"T": 1}](1, 2, grid=3)
    assert k.launched == 1


@pytest.fixture
def triton_source(tmp_path):
    (tmp_path / "k.py").write_text(
        "import triton\nimport triton.language as tl\n@triton.jit(do_not_specialize=['m'])\ndef k(out, n, m, s, B: tl.constexpr): pass\n"
    )
    return Triton("k.py", folder=str(tmp_path))


@pytest.mark.parametrize(
    ("args", "signature", "kept"),
    [
        ((torch.empty(32), 16, 16, 0.5), ("*f32:16", "i32:16", "i32", "f32"), (0, 1, 2, 3)),
        ((torch.empty(32)[1:], 1, 1, 1.0), ("*f32", "1", "i32", "f32"), (0, 2, 3)),
        ((torch.empty(32, device="meta")[4:], 2**31, -(2**31), 2.0), ("*f32:16", "i64:16", "i32", "f32"), (0, 1, 2, 3)),
        ((None, 2**63, True, 2.0), ("None", "u64:16", "bool", "f32"), (1, 2, 3)),
    ],
)  # fmt: skip
def test_triton_specialises_as_triton_does(triton_source, args, signature, kept):
    call = Call("k", (("B", 64),), args, {"grid": 1, "num_warps": 8})
    variant, found = variant_of("test::k", triton_source, call)
    assert (variant.signature, found, variant.options) == (signature, kept, (("num_warps", 8),))


def test_a_tensor_of_a_type_that_triton_has_not_is_refused(triton_source):
    call = Call("k", (("B", 64),), (torch.empty(1, dtype=torch.complex64), 1, 1, 1.0), {"grid": 1})
    with pytest.raises(LaunchError, match=r"Triton has no torch.complex64: .*view_as_real"):
        variant_of("test::k", triton_source, call)


@pytest.mark.parametrize(
    ("name", "template", "count", "says"),
    [("k", (), 4, r"needs the constexpr `B`, so pass it in brackets: k.k\[\{'B': …\}\]\(…\)$"), ("k", (("B", 1), ("C", 1)), 4, r"`k\(.*\)` has no parameter `C`$"),
     ("k", (("B", 1),), 3, r"`k\(.*, B\)` takes 4 arguments \(.*\), got 3$"),
     ("other", (), 0, "has no @triton.jit function `other`")],
)  # fmt: skip
def test_a_wrong_triton_call_says_what_is_wrong(triton_source, name, template, count, says):
    with pytest.raises(LaunchError, match=says):
        variant_of("test::k", triton_source, Call(name, template, (1,) * count, {}))


def test_a_constexpr_default_is_compiled_in(tmp_path):
    (tmp_path / "k.py").write_text(
        "import triton\nimport triton.language as tl\n"
        "@triton.jit\ndef k(x, B: tl.constexpr = 64, n=None): pass\n"
    )
    source = Triton("k.py", folder=str(tmp_path))
    variant, _ = variant_of("test::k", source, Call("k", (), (torch.empty(1), 5), {"grid": 1}))
    assert (variant.template, variant.signature[1]) == ((("B", 64),), "i32")
    (tmp_path / "broken.py").write_text("\ndef k(:\n")
    with pytest.raises(CompileError, match=r"broken.py\(2\): error: "):
        variant_of("test::k", Triton("broken.py", folder=str(tmp_path)), Call("k", (), (), {}))


def helper(condition):
    torch._check(condition, lambda: "the helper says no")


def test_the_quick_copy_follows_a_helper_that_is_rebound(monkeypatch):
    def launch(k, x):
        helper(x < 10)

    with_fast_check(launch)(None, 1)
    monkeypatch.setattr(sys.modules[__name__], "helper", lambda condition: torch._check(False))
    with pytest.raises(RuntimeError):
        with_fast_check(launch)(None, 1)
    monkeypatch.undo()
    with_fast_check(launch)(None, 1)


COUNT = None
SIZES_OF = {helper: 7}


def count():
    global COUNT  # noqa: PLW0603  what the test is about
    COUNT = (COUNT or 0) + 1


def counts(k):
    torch._check(True)
    count()
    return COUNT


def by_a_function(k):
    torch._check(True)
    return SIZES_OF[helper]


def by_globals(k):
    torch._check(True)
    return globals()["SIZES_OF"]


@pytest.mark.parametrize("launch", [counts, by_a_function, by_globals], ids=lambda f: f.__name__)
def test_a_function_with_a_check_reads_the_names_of_its_module(launch, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "COUNT", None)
    results = [with_fast_check(launch)(None) for _ in range(3)]
    wanted = {counts: [1, 2, 3], by_a_function: [7] * 3, by_globals: [SIZES_OF] * 3}
    assert results == wanted[launch]


def test_a_function_whose_names_keep_changing_runs_itself(monkeypatch):
    def launch(k):
        torch._check(True)
        return COUNT

    for number in range(30):
        monkeypatch.setattr(sys.modules[__name__], "COUNT", number)
        assert with_fast_check(launch)(None) == number
    assert with_fast_check(launch) is launch


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch function that is an object; `Launch(1) == Launch(1.0)`."""

    factor: float

    def __call__(self, k, x):
        return type(self.factor)


def test_of_equal_launch_functions_each_runs_itself():
    for launch in (Launch(1), Launch(1.0)):
        assert with_fast_check(launch) is launch


@pytest.mark.parametrize("checks", [True, False])
def test_inputs_of_tune_may_have_no_hash(checks):
    class Inputs(list):
        """A callable list."""

        def __call__(self, x):
            return (x,)

    def launch(k, x):
        return torch._check(True) if checks else x

    tuning, signature = Tuning(lambda x: [{}], inputs=Inputs()), Signature("test::f(int x) -> int")
    tuned = Tuned(launch, tuning, signature)
    assert with_fast_check(tuned)(Kernels(ignore), 3) == (None if checks else 3)


@pytest.mark.long
def test_check_raises_the_authors_message_without_sympy(run_python):
    def launch(k, x):
        torch._check(x > 0, lambda: f"x must be positive, got {x}")
        helper(x < 10)
        return torch.float32

    light = with_fast_check(launch)
    assert light(None, 1) is torch.float32
    with pytest.raises(RuntimeError, match="x must be positive, got -1"):
        light(None, -1)
    with pytest.raises(RuntimeError, match="the helper says no"):
        light(None, 11)
    done = run_python(
        "import sys, torch, jitkern.ops; jitkern.ops.vec_add(torch.ones(1), torch.ones(1)); print('sympy' in sys.modules)"
    )
    assert done.stdout.strip() == "False", done.stderr


def test_cuda_needs_grid_and_block(tmp_path, monkeypatch):
    class Loaded:
        parameters: tuple = ()
        reference: str = ""
        meta: dict = {"symbol": "k", "parameters": []}

    source, device = Cuda("k.cu", folder=str(tmp_path)), torch.device("cuda", 0)
    runner = Runner("test::k", source, Target.parse(H100), device)
    monkeypatch.setattr(Runner, "loaded", lambda self, variant: Loaded())
    k = Kernels(runner)
    for keywords, says in [({}, "`grid` must be one to three sizes, got None"), ({"grid": 1}, "`block` must be"), ({"grid": 2**31, "block": 1}, "`grid`"),
                           ({"grid": (1, 1, 1, 1), "block": 1}, "`grid`"), ({"grid": -1, "block": 1}, "`grid`"), ({"grid": 1.5, "block": 1}, "`grid`")]:  # fmt: skip
        with pytest.raises(LaunchError, match=says):
            k.k(**keywords)
