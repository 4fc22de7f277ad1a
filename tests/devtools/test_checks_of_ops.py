"""What `jitkern check` finds: writes outside of tensors, single wrong numbers, wrong gradients."""

import itertools

import pytest
import torch

from jitkern import config
from jitkern.declare import Cpp, kernel
from jitkern.devtools import check
from jitkern.errors import CompilerNotFound

SOURCE = """
extern "C" void twice(float* o, float* x, long first, long last, long spoilt) {
  for (long i = first; i < last; i++) o[i] = 2 * x[i];
  if (spoilt < 0) x[spoilt] = 0;
}
"""
_number = itertools.count()


def rows_of(launch, sample, reference=lambda x: 2 * x, backward=None):
    op = kernel(f"jitkern_check::op{next(_number)}(Tensor x) -> Tensor", cpu=Cpp(text=SOURCE))
    op.launch("cpu")(launch)
    op.reference(reference)
    op.samples(lambda _: [sample])
    if backward:
        op.backward(backward)
    return {row.check: row for row in check.checks_of(op, ["cpu"])}


def test_a_wrong_fake_is_told_with_its_line():
    def none(x):
        pass

    def raising(x):
        return 1 / 0

    for fake, line, says in (
        (none, 1, "its fake returned None, and its schema says one tensor"),
        (raising, 2, "its fake raises ZeroDivisionError: division by zero"),
    ):
        op = kernel(f"jitkern_check::op{next(_number)}(Tensor x) -> Tensor", cpu=Cpp(text=SOURCE))
        op.launch("cpu")(twice)
        op.reference(lambda x: 2 * x)
        op.samples(lambda _: [torch.ones(3)])
        op.fake(fake)
        (row,) = (r for r in check.checks_of(op, ["cpu"]) if r.check == "opcheck")
        code = fake.__code__
        number = code.co_firstlineno + line - 1
        assert f"{code.co_filename}:{number}: {says}" in row.note and "scroll" not in row.note


def twice(k, x):
    x = x.contiguous()
    return twice_as_it_lies(k, x)


def twice_as_it_lies(k, x):
    out = torch.empty_like(x)
    k.twice(out, x, 0, x.numel(), 0)
    return out


def twice_and_one_more(k, x):
    out = torch.empty_like(x)
    k.twice(out, x, 0, x.numel() + 1, 0)
    return out


def twice_of_padded(k, x):
    out = x.new_zeros(x.numel())
    scratch = torch.empty(7)
    k.twice(scratch, x, -2, 7, 0)
    k.twice(out, x, 0, x.numel(), 0)
    return out


def twice_spoiling_x(k, x):
    out = torch.empty_like(x)
    k.twice(out, x, 0, x.numel(), -1)
    return out


@pytest.mark.long
@pytest.mark.common_cache
@pytest.mark.parametrize(
    ("launch", "what", "side"),
    [
        (twice_and_one_more, "result `out`, float32[100] of 400", "after its end, 4 bytes from byte 400"),
        (twice_of_padded, "a tensor of the launch function, float32[7] of 28", "before its beginning, 8 bytes from byte -8"),
        (twice_spoiling_x, "argument `x`, float32[100] of 400", "before its beginning, 4 bytes from byte -4"),
    ],
    ids=["result", "scratch", "argument"],
)  # fmt: skip
def test_a_write_outside_of_a_tensor_fails(launch, what, side):
    row = rows_of(launch, torch.randn(100))["reference"]
    told = f"sample 1, (float32[100]): {what} bytes: the kernel wrote {side} on"
    assert (row.ok, row.note) == (False, told)


def one_wrong(factor):
    def launch(k, x):
        out = 2 * x
        out[5] *= factor
        return out

    return launch


X = torch.linspace(-3, 3, 100)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 1.05), (torch.float16, 1.006)])
def test_one_wrong_number_in_16_bits_fails(dtype, factor):
    row = rows_of(one_wrong(factor), X.to(dtype))["reference"]
    assert row.ok is False
    assert "out[5]: got " in row.note
    assert "1 wrong of 100 numbers" in row.note
    assert rows_of(one_wrong(1), X.to(dtype))["reference"].ok


def test_a_kernel_of_sums_may_round_between():
    w = torch.linspace(-1, 1, 64).reshape(8, 8)

    def rounded_twice(k, x):
        return x.softmax(-1) @ w.to(x)

    def reference(x):
        return (x.double().softmax(-1) @ w.double()).to(x.dtype)

    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert rows_of(rounded_twice, x, reference)["reference"].ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_a_sum_of_any_order_passes(shift, dtype):
    x = (torch.randn(16, 4096, generator=torch.Generator().manual_seed(0)) + shift).to(dtype)
    assert rows_of(lambda k, x: x.cumsum(-1)[:, -1].clone(), x, lambda x: x.sum(-1))["reference"].ok
    note = rows_of(lambda k, x: x[:, 1:].sum(-1), x, lambda x: x.sum(-1))["reference"].note
    assert note.endswith("wrong of 16 numbers")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_in_a_smaller_dtype_fails(dtype):
    def rounded_between(k, x):
        total = x[:, :1].to(torch.bfloat16)
        for column in x[:, 1:].to(torch.bfloat16).split(1, dim=1):
            total = total + column
        return total[:, 0].to(x.dtype)

    x = torch.rand(8, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert rows_of(rounded_between, x, lambda x: x.sum(-1))["reference"].ok is False


def test_a_result_in_another_dtype_fails():
    row = rows_of(lambda k, x: (2 * x).double(), X)["reference"]
    assert not row.ok and "gave (float64[100]), the reference (float32[100])" in row.note


def test_results_that_are_not_numbers_are_compared():
    row = rows_of(lambda k, x: x > 1, X, lambda x: x > 0)["reference"]
    assert not row.ok and "got False, expected True" in row.note
    assert rows_of(lambda k, x: x > 0, X, lambda x: x > 0)["reference"].ok
    assert rows_of(lambda k, x: x.long(), X, lambda x: x.long())["reference"].ok


@pytest.mark.long
def test_a_serial_sum_of_equal_terms_passes():
    def serial(k, x):
        total = x.new_zeros(())
        for value in x.unbind():
            total = total + value
        return total

    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).double()
    assert rows_of(serial, x, torch.sum)["reference"].ok


def test_the_largest_sample_has_other_layouts():
    op = kernel(
        f"jitkern_check::op{next(_number)}(Tensor x) -> Tensor",
        cpu=Cpp(text=SOURCE, strided=True),
    )
    op.launch("cpu")(twice_as_it_lies)
    op.reference(lambda x: 2 * x)
    op.samples(lambda _: [torch.ones(1), torch.arange(100.0), torch.ones(7)])
    assert "`x` sliced, with strides [2]" in next(check.checks_of(op, ["cpu"])).note


def test_what_an_op_refuses_may_be_a_value_error():
    def twice_of_dense(k, x):
        if not x.is_contiguous():
            raise ValueError("it must be contiguous")
        return twice(k, x)

    row = rows_of(twice_of_dense, torch.ones(5))["reference"]
    assert row.ok and "refused: `x` sliced, `x` expanded" in row.note


def test_what_the_own_code_raises_has_its_line():
    def raising(x):
        assert x.numel() > 9

    row = rows_of(twice, torch.ones(3), raising)["reference"]
    line = raising.__code__.co_firstlineno + 1
    assert row.note.startswith(f"{__file__}:{line}: AssertionError")
    assert row.note.endswith("\nfrom the reference, on sample 1, (float32[3])")


def test_a_reference_that_needs_a_compiler_is_not_tried():
    def needing(x):
        raise CompilerNotFound("no compiler", remedy="install one")

    assert rows_of(twice, torch.ones(3), needing)["reference"].ok is None


def test_an_op_that_is_a_gradient_needs_no_samples():
    backward = kernel(
        f"jitkern_check::op{next(_number)}(Tensor grad) -> Tensor", cpu=Cpp(text=SOURCE)
    )
    backward.launch("cpu")(twice)
    forward = kernel(f"jitkern_check::op{next(_number)}(Tensor x) -> Tensor", cpu=Cpp(text=SOURCE))
    assert [row.ok for row in check.checks_of(backward, ["cpu"])] == [False]
    forward.backward(backward)
    (row,) = check.checks_of(backward, ["cpu"])
    assert row.ok is None
    assert row.note.startswith(f"no samples: {forward.name} checks it as its gradient")


def test_an_op_without_kernels_is_told():
    op = kernel(f"jitkern_check::op{next(_number)}(Tensor x) -> Tensor", cpu=[])
    [row] = check.checks_of(op, ["cpu"])
    assert row.ok is None and row.note == "none: give some as cpu= or cuda="


def test_a_large_number_hides_no_wrong_small_one():
    x = torch.tensor([1e30, 2.0, 3.0, 1.0])
    assert rows_of(lambda k, x: x + (x < 4) * 0.01, x, torch.clone)["reference"].ok is False


def test_random_samples_are_the_same_each_time():
    op = kernel(f"jitkern_check::op{next(_number)}(Tensor x) -> Tensor", cpu=Cpp(text=SOURCE))
    op.launch("cpu")(one_wrong(1.5))
    op.reference(lambda x: 2 * x)
    op.samples(lambda _: [torch.randn(5)])
    state = torch.random.get_rng_state()
    first, second = (next(check.checks_of(op, ["cpu"])) for _ in range(2))
    assert first.note == second.note
    assert first.ok is False
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        (lambda _: [(torch.ones(4), 3)], "sample 1 does not fit the op: got 2 arguments"),
        (lambda _: None, "TypeError: 'NoneType' object is not iterable"),
        (lambda _: [], "they yield no calls"),
    ],
)
def test_samples_that_do_not_fit_the_op_fail(samples, says):
    op = kernel(f"jitkern_check::op{next(_number)}(Tensor x) -> Tensor", cpu=Cpp(text=SOURCE))
    op.launch("cpu")(twice)
    op.samples(samples)
    (row,) = check.checks_of(op, ["cpu"])
    assert (row.check, row.ok) == ("samples", False)
    assert says in row.note
    assert says.startswith("they") or row.note.startswith(f"{__file__}:")


def test_zeros_for_small_results_in_16_bits_fail():
    row = rows_of(lambda k, x: x * 0, torch.ones(4, 500).half(), lambda x: x.softmax(-1))
    assert row["reference"].ok is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_is_compared_with_that_of_the_reference(dtype):
    def checked(factor):
        rows = rows_of(one_wrong(1), X.to(dtype), backward=lambda grad: factor * grad)
        assert rows["opcheck"].ok
        assert rows["gradcheck"].ok is None
        return rows["gradient"]

    assert checked(2).ok
    wrong = checked(2.5)
    assert wrong.ok is False
    assert "sample 1, " in wrong.note
    assert "the gradient of `x`[" in wrong.note


def test_a_reference_without_gradient_checks_none():
    row = rows_of(one_wrong(1), X, lambda x: 2 * x.detach(), lambda grad: 2 * grad)["gradient"]
    assert row.ok is None
    assert "its reference has a gradient" in row.note


def test_without_a_compiler_nothing_is_checked():
    with config.using(cxx="no-such-compiler"):
        rows = rows_of(twice, X, backward=lambda grad: 2 * grad)
    assert [row.ok for row in rows.values()] == [None] * len(rows)
    assert rows["opcheck"].note.startswith("no kernel ran: ")


def test_an_error_of_a_backward_is_told_with_its_line():
    def backward(grad):
        return {}["slope"]

    row = rows_of(one_wrong(1), X, backward=backward)["opcheck"]
    line = backward.__code__.co_firstlineno + 1
    where = "test_aot_dispatch_dynamic, sample 1, (float32[100])"
    assert row.note == f"{__file__}:{line}: KeyError: 'slope'\nin {where}"


def test_a_changed_argument_has_a_remedy_and_its_gradient():
    def changing(k, x):
        out = 2 * x
        x += 1
        return out

    rows = rows_of(changing, X, backward=lambda grad: 2 * grad)
    assert "was mutated: write `Tensor(a!) x` in the schema, or copy it" in rows["opcheck"].note
    assert rows["gradient"].ok


def test_a_wrong_gradient_in_float64_is_told_shortly():
    rows = rows_of(one_wrong(1), X.double(), backward=lambda grad: 3 * grad)
    first, *numbers = rows["gradcheck"].note.splitlines()
    assert (rows["gradcheck"].ok, "Jacobian mismatch" in first) == (False, True)
    assert [line.partition(":")[0] for line in numbers] == ["numerical", "analytical"]


def test_a_copy_of_what_lies_beyond_a_tensor_is_found():
    text = 'extern "C" void copied(float* o, float* x, long n) { for (; n >= 0; n--) o[n] = x[n]; }'
    op = kernel(f"jitkern_check::op{next(_number)}(Tensor x) -> Tensor", cpu=Cpp(text=text))

    @op.launch("cpu")
    def launch(k, x):
        out = torch.empty_like(x)
        k.copied(out, x, x.numel())
        return out

    op.reference(lambda x: x.clone())
    op.samples(lambda _: [X])
    assert "the kernel wrote after its end" in next(check.checks_of(op, ["cpu"])).note
