from functools import partial

import pytest
import torch

from jitkern.errors import LaunchError
from jitkern.launch.arguments import checked
from jitkern.launch.parameters import written
from jitkern.source.kinds import Cpp, Triton, Variant

CPU = torch.device("cpu")


def test_arguments_pass_as_they_are():
    given = [torch.zeros(3), 2**40, 0.5, True, None]
    assert checked("k", ["*f32", "i64", "f32", "bool", "*f32"], given, CPU) is given


@pytest.mark.parametrize(
    ("code", "arg", "says"),
    [
        ("*f32", torch.zeros(1).double(), "argument 1 must be a float32 tensor, got a tensor of torch.float64; it"),
        ("*f32", 3, "must be a tensor, got int `3`"),
        ("*f32", torch.zeros(1, device="meta"), "must be a tensor on cpu, got one on meta"),
        ("i32", 2**31, "must be an integer that fits i32, got 2147483648"),
        ("u8", -1, "must be an integer that fits u8, got -1"),
        ("i64", 2**63, "must be an integer that fits i64"),
        ("i64", 1.0, "must be i64, got float `1.0`"),
        ("i64", True, "must be i64, got bool `True`"),
        ("bool", 1, "must be bool, got int `1`"),
        ("f32", "x", "must be f32, got str `x`"),
        ("f32", True, "must be f32, got bool"),
        ("i32", torch.zeros(1), "must be i32, got Tensor"),
        ("", 1, "argument 1 must be of a type that launches can pass"),
        ("f32", 3.5e38, r"must be a number that fits f32, got 3.5e\+38"),
        ("f32", -(2**128), "must be a number that fits f32, got -340282"),
        ("f64", 10**400, "must be a number that fits f64, got 10000"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(code, arg, says):
    with pytest.raises(LaunchError, match=f"`k`.*{says}"):
        checked("`k` of ns::op", [code], [arg], CPU)


def test_infinities_and_the_largest_float_fit():
    for value in (float("inf"), -float("inf"), float("nan"), 3.4028235e38):
        assert checked("k", ["f32", "f64"], [value, value], CPU)


@pytest.mark.parametrize("args", [[], [1], [1, 2, 3]])
def test_a_wrong_count_lists_the_parameters(args):
    with pytest.raises(LaunchError, match=rf"k takes 2 arguments \(\*f32, i64\), got {len(args)}"):
        checked("k", ["*f32", "i64"], args, CPU)


COMPATIBLE = {
    "*u8": torch.bool, "*i8": torch.uint8, "*i64": torch.int64, "*": torch.complex64, "*bool": torch.bool,
}  # fmt: skip
INCOMPATIBLE = {
    "*i32": (torch.int64, torch.float32), "*f16": (torch.bfloat16,), "*f32": (torch.int32,), "*i16": (torch.bool,),
}  # fmt: skip


@pytest.mark.parametrize("code", COMPATIBLE)
def test_integers_of_one_width_are_compatible(code):
    x = torch.zeros(1, dtype=COMPATIBLE[code])
    assert checked("k", [code], [x], CPU) == [x]


@pytest.mark.parametrize("code", INCOMPATIBLE)
def test_other_dtypes_are_not(code):
    for dtype in INCOMPATIBLE[code]:
        with pytest.raises(LaunchError):
            checked("k", [code], [torch.zeros(1, dtype=dtype)], CPU)


@pytest.fixture
def told(tmp_path):
    """Why a launch of a kernel of this text is refused, whose parameters have these codes."""

    def run(text, codes, args, function="k", kept=None, source=Cpp, **headers):
        source = source("k.py" if source is Triton else "k.cpp", folder=str(tmp_path))
        source.paths[0].write_text(text)
        for name, content in headers.items():
            (tmp_path / f"{name}.h").write_text(content)
        variant = Variant("ns::op", source, function, (("B", 8),))
        with pytest.raises(LaunchError) as error:
            checked("`k`", codes, args, CPU, partial(written, variant, kept, len(codes)))
        return str(error.value)

    return run


def test_a_parameter_is_named_as_it_is_written(told):
    text = 'extern "C" void k(T* __restrict__ out,  // of n\n const T x[4], int64_t n) {}'
    codes, x = ["*f32", "*f32", "i64"], torch.zeros(4)
    takes = "(T* __restrict__ out, const T x[4], int64_t n)"
    assert told(text, codes, [x, 4, x]) == (
        f"`k`: argument 2 (`const T x[4]`) must be a tensor, got int `4`; it takes {takes}"
    )
    assert told(text, codes, [x, x]) == f"`k` takes 3 arguments {takes}, got 2"


def test_a_parameter_of_an_overload_in_a_header_is_named(told):
    header = "void k(float* x);\nvoid k(float* x, int n) {}\nnamespace a { void k(int i, int j); }"
    text = '#include "a.h"'
    codes, args, shorter = ["*f32", "i32"], [None, 0.5], header.partition("\nnames")[0]
    found = told(text, codes, args, "::k(float*, int)", a=shorter)
    assert "argument 2 (`int n`) must be" in found
    found = told(text, codes, args, a=header)  # which one is meant is not told
    assert "argument 2 must be i32, got float `0.5`; it takes (*f32, i32)" in found


def test_a_parameter_that_a_macro_writes_is_told_by_its_type(told):
    text = "#define K(name) void name(int n) {}\nK(k)"
    says = "argument 1 must be i32, got float `0.5`; it takes (i32)"
    assert told(text, ["i32"], [0.5]).endswith(says)


def test_a_triton_parameter_is_named_by_its_place_in_the_launch(told):
    text = "import triton\nimport triton.language as tl\n@triton.jit\ndef k(x, one, n, B: tl.constexpr): pass"
    assert told(text, ["*f32", "i32"], [None, 2**31], kept=(0, 2), source=Triton) == (
        "`k`: argument 3 (`n`) must be an integer that fits i32, got 2147483648; it takes (x, one, n)"
    )
