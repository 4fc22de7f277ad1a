"""Optional and in-place arguments, launches and errors, by proxies and by the Python launcher."""

import itertools

import pytest
import torch
from subject import NAN, E, gathered, ints, reals

from jitkern.runtime import specializer

pytestmark = pytest.mark.common_cache


# ------------------------------------------------------------------- optional and in-place


def present(k, x, y, n, f, b):
    first = y.numel() if y is not None else -1
    flag = -1 if b is None else 10 if b else 20
    return reals(k, first, n if n is not None else -2, -3.5 if f is None else f * 2, flag)


@pytest.mark.long
def test_none_is_told_from_what_is_given(subject):
    signature = "(Tensor x, Tensor? y=None, int? n=None, float? f=None, bool? b=None) -> Tensor"
    tested = subject(signature, present)
    each = (None, torch.ones(4)), (None, 0, 7), (None, 0.0, NAN), (None, True, False)
    given = list(itertools.product(*each))
    for call in given:
        tested.learns(E, *call)
    for call in given:
        tested.serves(E, *call)
    tested.serves(E)
    assert tested.misses == 2 * 2 * 2 * 3


@pytest.mark.long
def test_an_optional_tensor_reaches_its_kernel_as_null(subject):
    def launch(k, x, y, a):
        x = x.contiguous()
        out = torch.empty_like(x)
        k.axpy[{"T": x.dtype}](out, a if a is not None else 1.0, x, y, x.numel())
        return out

    tested = subject("(Tensor x, Tensor? y=None, float? a=None) -> Tensor", launch)
    for call in ((torch.ones(3),), (torch.ones(4), torch.ones(4)), (torch.ones(2), None, 5.0)):
        tested.learns(*call)
    tested.agrees(torch.ones(3), torch.ones(3).double())


@pytest.mark.long
def test_a_bool_is_constant_in_a_variant(subject):
    tested = subject(
        "(Tensor x, bool b, bool c=False) -> Tensor",
        lambda k, x, b, c: ints(k, int(b), int(b is True), int(b and not c), int(c is False)),
    )
    for b, c in itertools.product((True, False), repeat=2):
        tested.learns(E, b, c)
    assert tested.misses == 4


@pytest.mark.long
def test_keyword_only_arguments_are_traced_too(subject):
    tested = subject(
        "(Tensor x, int n=3, *, float f=0.5, Tensor? y=None) -> Tensor",
        lambda k, x, n, *, f, y: reals(k, n, f, int(y is not None)),
    )
    for given in ({}, {"f": 2.0}, {"n": -1}, {"y": torch.ones(1)}, {"f": -0.5, "n": 9}):
        wanted = [given.get("n", 3), given.get("f", 0.5), int("y" in given), 0]
        for _ in range(2):
            assert tested.op(E, **given).tolist() == wanted
            specializer.settle()
    assert tested.misses == 2


def add_in_place(k, x, value):
    k.add(x, x.numel(), value)


@pytest.mark.long
def test_an_argument_that_is_changed_has_another_version(subject):
    tested = subject("(Tensor(a!) x, float value) -> ()", add_in_place)
    tested.learns(torch.zeros(4).double(), 2.0)
    x, before = torch.zeros(3).double(), tested.misses
    for count in (1, 2):
        tested.op(x, 1.5)
        assert (x._version, x.tolist()) == (count, [1.5 * count] * 3)
    assert tested.misses == before


@pytest.mark.long
def test_an_argument_that_is_only_read_keeps_its_version(subject):
    tested = subject("(Tensor x) -> Tensor", gathered)
    x = torch.ones(2, 3).t()
    tested.learns(x)
    tested.op(x)
    assert x._version == 0


def test_an_inference_tensor_is_changed_though_it_has_no_version(subject):
    tested = subject("(Tensor(a!) x, float value) -> ()", add_in_place)
    with torch.inference_mode():
        x = torch.zeros(3).double()
        for _ in range(2):
            tested.op(x, 1.0)
            specializer.settle()
        assert x.tolist() == [2, 2, 2]
    assert tested.misses == 1


IN_PLACE = {
    "first": lambda k, x: k.add(x, 1, 1.0),
    "slice": lambda k, x: k.add(x[1:], 1, 1.0) if x.shape[0] > 1 else None,
    "zero_": lambda k, x: (x.zero_(), None)[1],
    "zero_a_column": lambda k, x: (x[:, 0].zero_(), None)[1],
    "copy_": lambda k, x: (x.copy_(torch.zeros(x.shape, dtype=x.dtype)), None)[1],
    "copy_to_a_view": lambda k, x: (x.t()[0].copy_(torch.zeros(x.shape[0], dtype=x.dtype)), None)[1],
    "through_contiguous": lambda k, x: (x.copy_(twice(k, x.contiguous())), None)[1],
    "through_view": lambda k, x: k.add(x.view(-1), x.numel(), 1.0),
    "through_reshape": lambda k, x: k.add(x.reshape(-1), x.numel(), 1.0),
    "through_flatten": lambda k, x: k.add(x.flatten(), x.numel(), 1.0),
    "first_of_a_reshaped": lambda k, x: k.add(x.reshape(x.shape[0], x.shape[1], 1), 1, 1.0),
    "to_the_same_dtype": lambda k, x: k.add(x.to(torch.float64), 1, 1.0),
}  # fmt: skip


def twice(k, x):
    out = torch.empty_like(x)
    k.axpy[{"T": x.dtype}](out, 2.0, x, None, x.numel())
    return out


@pytest.mark.long
@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_done_in_place_is_done_to_the_argument(subject, name):
    tested = subject("(Tensor(a!) x) -> ()", IN_PLACE[name])
    loose = torch.arange(24.0).double().view(4, 6)
    given = [torch.ones(3, 4).double(), torch.ones(1, 1).double()]
    given += [loose.t(), loose[:, 2:4], loose[::2], loose[:, ::2], loose[1:, :1]]
    for x in given * 2:
        tested.agrees(x)
        specializer.settle()
    tested.serves(given[0])


# -------------------------------------------------------------------------- launches and errors


@pytest.mark.long
def test_launches_run_in_order(subject):
    def launch(k, x):
        out = torch.zeros(x.numel(), dtype=torch.float64)
        n = out.numel()
        k.add(out, n, 1.0)
        k.axpy[{"T": out.dtype}](out, 3.0, out, None, n)
        if n > 2:
            k.add(out[2:], n - 2, 10.0)
        return out

    tested = subject("(Tensor x) -> Tensor", launch)
    for n in (5, 2, 0):
        tested.learns(torch.ones(n))
    for n in (3, 1, 50):
        tested.serves(torch.ones(n))


@pytest.mark.long
@pytest.mark.parametrize(
    ("template", "values"),
    [
        (lambda x, n, f: n, [(3, 0.0), (-7, 0.0), (2**40, 0.0)]),
        (lambda x, n, f: 1 << (n - 1).bit_length(), [(3, 0.0), (5, 0.0), (9, 0.0)]),
        (lambda x, n, f: f, [(1, 1.5), (1, -2.25), (1, 1e30)]),
        (lambda x, n, f: x.shape[0] % 4, [(1, 0.0)]),
        (lambda x, n, f: n > 3, [(3, 0.0), (4, 0.0)]),
    ],
    ids=["int", "computed_int", "float", "size", "bool"],
)
def test_another_value_of_a_template_argument_is_another_variant(subject, template, values):
    def launch(k, x, n, f):
        out = torch.empty(1, dtype=torch.float64)
        k.constant[{"N": template(x, n, f)}](out)
        return out

    tested = subject("(Tensor x, int n, float f) -> Tensor", launch)
    for value in values:
        tested.learns(E, *value)
    for value in values:
        tested.serves(E, *value)
    assert tested.misses == len(values)


@pytest.mark.long
def test_a_negative_zero_is_a_template_argument_of_its_own(subject):
    def launch(k, x, f):
        out = torch.empty(1, dtype=torch.float64)
        k.constant[{"N": f}](out)
        return out

    tested = subject("(Tensor x, float f) -> Tensor", launch)
    for f in (0.0, -0.0) * 2:
        assert str(tested.op(E, f).item()) == str(f)
        specializer.settle()


@pytest.mark.long
def test_a_value_that_is_looked_at_is_constant_in_a_variant(subject):
    tested = subject(
        "(Tensor x, int n) -> Tensor",
        lambda k, x, n: ints(k, {1: 10, 2: 20}.get(n, n), len(str(n)), len(f"{n:>9}"), hash(n)),
    )
    for n in (1, 2, 3, -4, 1000):
        tested.learns(E, n)
    for n in (1000, 3, 1, -4, 2):
        tested.serves(E, n)


def check(k, x, n):
    torch._check(x.dim() == 2, lambda: f"check: x must be a matrix, got {tuple(x.shape)}")
    torch._check(
        n > 0 and x.shape[1] % n == 0,
        lambda: f"check: {x.shape[1]} columns do not make groups of {n}",
    )
    if n == 13:
        raise ValueError(f"check: {n} is unlucky")
    return ints(k, x.shape[1] // n)


BAD = [
    (torch.ones(3, 5), 2, RuntimeError, "check: 5 columns do not make groups of 2"),
    (torch.ones(3, 8), -2, RuntimeError, "check: 8 columns do not make groups of -2"),
    (torch.ones(7), 2, RuntimeError, r"check: x must be a matrix, got \(7,\)"),
    (torch.ones(3, 26), 13, ValueError, "check: 13 is unlucky"),
]


@pytest.mark.long
@pytest.mark.parametrize(("x", "n", "kind", "says"), BAD, ids=["size", "number", "rank", "typed"])
def test_an_authors_error_reaches_the_caller(subject, x, n, kind, says):
    tested = subject("(Tensor x, int n) -> Tensor", check)
    tested.learns(torch.ones(3, 4), 2)
    with pytest.raises(kind, match=says) as typed:
        tested.op(x, n)
    assert type(typed.value) is kind
    with pytest.raises(RuntimeError, match=says):
        tested.op.overload(x, n)
    tested.serves(torch.ones(3, 6), 3)


@pytest.mark.long
def test_a_division_by_zero_is_raised_at_a_later_call(subject):
    tested = subject(
        "(Tensor x, int n, float f) -> Tensor", lambda k, x, n, f: reals(k, 5 // n, 2.0 / f, 7 % n)
    )
    tested.learns(E, 2, 0.5)
    for n, f in ((0, 0.5), (2, 0.0), (2, -0.0)):
        with pytest.raises(ZeroDivisionError):
            tested.op(E, n, f)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            tested.op.overload(E, n, f)
    tested.serves(E, -3, 1.0)


@pytest.mark.long
@pytest.mark.parametrize(
    "given",
    ["x", "out", "n", "v0", "v", "y0", "m0", "workspace", "K", "odd", "call", "real", "api", "owned", "int",
     "DONE", "MISS", "i64", "Tensor", "stub", "linux", "failed", "release", "a0"],
)  # fmt: skip
def test_an_argument_may_have_any_name(subject, given):
    tested = subject(
        f"(Tensor t, int {given}, int other) -> Tensor",
        lambda k, t, n, other: ints(k, n + 1, n * other, t.numel(), n // other),
    )
    tested.learns(torch.ones(3), 7, 2)
    for n in (0, 1, 2, 3, -5):
        tested.serves(torch.ones(4), n, 5)
    tested.asks_python(torch.ones(4), 3, 0)


@pytest.mark.long
def test_the_same_tensor_may_be_given_twice(subject):
    tested = subject(
        "(Tensor x, Tensor y) -> Tensor",
        lambda k, x, y: ints(k, x.numel(), int(x.data_ptr() == y.data_ptr())),
    )
    x = torch.ones(3)
    for y in (x, torch.ones(3)):
        tested.learns(x, y)
    tested.serves(x, x)
