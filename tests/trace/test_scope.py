"""What launch functions read besides their arguments: the answer is the one that Python gives now."""

import functools
import itertools
import operator
import random
import types
import weakref

import pytest
import torch
from helpers import declared, programs_of
from subject import length_of

from jitkern.runtime import specializer
from jitkern.trace.scope import Scope

_number = itertools.count()
SOURCE = """
extern "C" void scale(T* out, const T* x, double a, long n) { for (long i = 0; i < n; i++) out[i] = a * x[i]; }
"""
FACTOR = 2.0
PAIR = (1.0, 2.0)
KIND = torch.float32
TABLE = {"a": 2.0, "c": 3.0}
LISTED = [2.0]
CALLS = 0
UNRELATED = 0
settings = types.SimpleNamespace(factor=2.0)
constants = types.ModuleType("constants")
constants.factor = 2.0
WEIGHT = torch.ones(2)


def double(n):
    return 2.0 * n


def triple(n):
    return 3.0 * n


chosen = double


def with_attribute():
    return 1.0


with_attribute.factor = 2.0


def same(a, b):
    return a is b


@pytest.fixture
def declare(tmp_path):
    """A fresh op with this launch function over one tensor, or two."""

    def make(launch, schema="(Tensor x) -> Tensor"):
        schema = f"jitkern_scope::f{next(_number)}{schema}"
        return declared(schema, tmp_path / "k.cpp", SOURCE, launch)

    return make


def scaled(k, x, a):
    out = torch.empty_like(x)
    k.scale[{"T": x.dtype}](out, x, a, x.numel())
    return out


def value(op, *args):
    """What a call gives, and whether Python was not asked."""
    specializer.settle()
    before = programs_of(op).misses
    result = op(*(args or (torch.ones(2),)))[0].item()
    return result, programs_of(op).misses == before


def serves(op, expected, *args):
    """Two calls give this, and another one asks no Python."""
    for _ in range(2):
        assert value(op, *args)[0] == expected
    assert value(op, *args) == (expected, True), programs_of(op).refused


def reads_a_number(k, x):
    return scaled(k, x, FACTOR)


def reads_a_tuple(k, x):
    return scaled(k, x, PAIR[1])


def reads_a_dtype(k, x):
    return scaled(k, x, 2.0 if x.dtype == KIND else 3.0)


def reads_a_dict_beside_a_check(k, x):
    torch._check(x.dim() == 1)
    return scaled(k, x, TABLE["a"])


def reads_a_module(k, x):
    return scaled(k, x, constants.factor)


def calls_a_function(k, x):
    return scaled(k, x, chosen(1))


def asks_for_a_name(k, x):
    act = chosen
    return scaled(k, x, 2.0 if act.__name__ == "double" else 3.0)


def calls_a_builtin(k, x):
    return scaled(k, x, 1.0 * abs(-2))


class Thrice(types.ModuleType):
    """A module with a property."""

    factor = property(lambda _: 3.0)


REBOUND = {
    "number": (reads_a_number, lambda patch: patch.setitem(globals(), "FACTOR", 3.0)),
    "tuple": (reads_a_tuple, lambda patch: patch.setitem(globals(), "PAIR", (1.0, 3.0))),
    "dtype": (reads_a_dtype, lambda patch: patch.setitem(globals(), "KIND", torch.float64)),
    "name of a module": (reads_a_module, lambda patch: patch.setattr(constants, "factor", 3.0)),
    "class of a module": (reads_a_module, lambda patch: patch.setattr(constants, "__class__", Thrice)),
    "function": (calls_a_function, lambda patch: patch.setitem(globals(), "chosen", triple)),
    "code of a function": (calls_a_function, lambda patch: patch.setattr(double, "__code__", triple.__code__)),
    "builtin hidden": (calls_a_builtin, lambda patch: patch.setitem(globals(), "abs", lambda _: 3)),
    "builtin": (calls_a_builtin, lambda patch: patch.setattr("builtins.abs", lambda _: 3)),
    "function of Torch": (reads_a_number, lambda patch: patch.setattr(torch, "empty_like", torch.zeros_like)),
}  # fmt: skip


def test_the_name_of_a_function_ends_a_trace(declare, monkeypatch):
    op = declare(asks_for_a_name)
    for _ in range(2):
        assert value(op) == (2.0, False)
    monkeypatch.setitem(globals(), "chosen", triple)
    assert value(op) == (3.0, False)
    (told,) = programs_of(op).refused.values()
    assert "the attribute `__name__` cannot be traced" in told


@pytest.mark.long
@pytest.mark.parametrize("name", REBOUND)
def test_what_is_rebound_is_seen_by_the_next_call(declare, name):
    launch, rebind = REBOUND[name]
    op = declare(launch)
    serves(op, 2.0)
    with pytest.MonkeyPatch.context() as patch:
        rebind(patch)
        expected = 2.0 if name == "function of Torch" else 3.0
        assert value(op) == (expected, False)
    assert value(op)[0] == 2.0
    assert value(op) == (2.0, True)  # the variant of before serves again


@pytest.mark.long
def test_a_variable_of_an_outer_function_is_seen_to_change(declare):
    factor = 2.0

    def launch(k, x):
        return scaled(k, x, factor)

    op = declare(launch)
    serves(op, 2.0)
    factor = 3.0
    assert value(op) == (3.0, False)
    serves(op, 3.0)


@pytest.mark.long
def test_defaults_are_seen_when_they_change(declare):
    def launch(k, x, a=2.0, *, b=1.0):
        return scaled(k, x, a * b)

    op = declare(launch)
    serves(op, 2.0)
    launch.__defaults__ = (3.0,)
    serves(op, 3.0)
    launch.__kwdefaults__["b"] = 2.0
    serves(op, 6.0)


@pytest.mark.long
def test_the_keywords_of_a_partial_are_those_of_its_declaration(declare):
    launch = functools.partial(scaled, a=2.0)
    op = declare(launch)
    assert value(op)[0] == 2.0
    launch.keywords["a"] = 3.0
    serves(op, 2.0)


def test_what_a_name_was_bound_to_is_not_kept(declare, monkeypatch):
    op = declare(lambda k, x: scaled(k, x, float(WEIGHT.numel())))
    bound = []
    monkeypatch.setitem(globals(), "WEIGHT", None)
    for size in range(1, 9):
        globals()["WEIGHT"] = torch.ones(size)
        bound.append(weakref.ref(WEIGHT))
        assert value(op)[0] == size
    assert sum(weight() is not None for weight in bound) <= 2


DICTS = {
    "item": (lambda k, x: scaled(k, x, TABLE["a"]), lambda: TABLE.update(a=3.0)),
    "new item": (lambda k, x: scaled(k, x, TABLE.get("b", 2.0)), lambda: TABLE.update(b=3.0)),
    "order": (lambda k, x: scaled(k, x, next(iter(TABLE.values()))), lambda: TABLE.update(a=TABLE.pop("a"))),
    "length": (lambda k, x: scaled(k, x, float(len(TABLE))), lambda: TABLE.update(d=1.0)),
    "in a default": (lambda k, x, table=TABLE: scaled(k, x, table["a"]), lambda: TABLE.update(a=3.0)),
    "in a container": (lambda k, x: scaled(k, x, [TABLE][0]["a"]), lambda: TABLE.update(a=3.0)),
    "beside a check": (reads_a_dict_beside_a_check, lambda: TABLE.update(a=3.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", DICTS)
def test_a_dict_that_is_used_keeps_a_call_in_python(declare, monkeypatch, name):
    launch, change = DICTS[name]
    monkeypatch.setitem(globals(), "TABLE", TABLE)
    before = dict(TABLE)
    op = declare(launch)
    try:
        assert value(op) == (2.0, False)
        change()
        assert value(op) == (3.0, False)
    finally:
        TABLE.clear()
        TABLE.update(before)
    (told,) = programs_of(op).refused.values()
    assert "of type dict, cannot be traced: it can change unseen" in told


def test_a_dict_that_is_not_used_does_no_harm(declare):
    op = declare(lambda k, x: scaled(k, x, 2.0 if x.dim() else TABLE["a"]))
    serves(op, 2.0)


ACTIVATIONS = {"double": double, "triple": triple}


def test_a_dict_holds_the_functions_that_names_mean(declare):
    def launch(k, x):
        torch._check(x.dim() == 1)
        found = [*ACTIVATIONS.values()].index(triple), triple in ACTIVATIONS.values()
        return scaled(k, x, 2.0 if found == (1, True) and ACTIVATIONS["double"] is double else 3.0)

    op = declare(launch)
    for _ in range(3):
        assert value(op) == (2.0, False)


REPLACED = """
import math

import torch
from jitkern.declare import Cpp, kernel
from jitkern.runtime import specializer

empty, isfinite = torch.empty, math.isfinite
torch.empty = lambda *args, **kwargs: empty(*args, **kwargs).fill_(7)
math.isfinite = lambda number: number != 3 and isfinite(number)  # of others as it was
text = 'extern "C" void put(double* out, double a) { out[0] = a; }'
op = kernel("jitkern_replaced::f(Tensor x) -> Tensor", cpu=Cpp(text=text))


@op.launch("cpu")
def _(k, x):
    y = torch.empty(2, dtype=torch.float64)
    k.put(y, 3.0 if math.isfinite(x.shape[0]) else 5.0)
    return y


for _ in range(3):
    assert op(torch.ones(3)).tolist() == [5, 7]
    specializer.settle()
torch.empty, math.isfinite = empty, isfinite
for _ in range(3):
    assert op(torch.ones(3))[0].item() == 3
    specializer.settle()
"""


@pytest.mark.long
def test_a_function_replaced_before_the_first_trace_is_seen(run_python):
    result = run_python(REPLACED)
    assert not result.returncode, result.stderr


@pytest.mark.long
def test_a_method_of_tensors_that_is_replaced_is_seen(declare, monkeypatch):
    def launch(k, x):
        return scaled(k, x, 1.0 * x.contiguous().shape[0])

    op = declare(launch)
    serves(op, 2.0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "contiguous", lambda self: torch.ones(9), raising=False)
        for _ in range(2):
            assert value(op) == (9.0, False)
        (told,) = programs_of(op).refused.values()
        assert "`Tensor.contiguous`, which is not PyTorch's own, cannot be traced" in told
    assert value(op)[0] == 2.0
    assert value(op) == (2.0, True)


@pytest.mark.long
def test_an_index_of_tensors_that_is_replaced_is_seen(declare, monkeypatch):
    op = declare(lambda k, x: scaled(k, x, 1.0 * x[None].dim()))
    serves(op, 2.0)
    real = torch.Tensor.__getitem__
    other = lambda self, key: torch.ones(1, 1, 1) if key is None else real(self, key)
    monkeypatch.setattr(torch.Tensor, "__getitem__", other, raising=False)
    assert value(op) == (3.0, False)


@pytest.mark.long
def test_other_names_of_the_module_may_change_all_the_time(declare):
    global UNRELATED
    op = declare(reads_a_number)
    serves(op, 2.0)
    for UNRELATED in range(100):  # noqa: B007
        assert value(op) == (2.0, True)


def test_the_python_launcher_runs_the_function_as_it_is(declare, monkeypatch):
    def launch(k, x, unused):
        global CALLS  # noqa: PLW0603
        CALLS += 1
        return scaled(k, x, FACTOR)

    monkeypatch.setitem(globals(), "CALLS", 0)
    op = declare(launch, "(Tensor x, int[] unused) -> Tensor")
    assert op(torch.ones(1), []).item() == 2.0
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert op(torch.ones(1), []).item() == 3.0
    assert CALLS == 2


@functools.wraps(torch.nn.functional.relu)
def counting_relu(x):
    global CALLS  # noqa: PLW0603
    CALLS += 1
    return torch.relu(x)


def test_a_function_that_wraps_one_of_torch_is_not_one_of_torch(declare, monkeypatch):
    def launch(k, x):
        torch._check(x.dim() == 1)
        counting_relu(x)
        return scaled(k, x, float(CALLS))

    monkeypatch.setitem(globals(), "CALLS", 0)
    op = declare(launch)
    for calls in (1.0, 2.0, 3.0):
        assert value(op) == (calls, False)


class Settings(types.ModuleType):
    """A module with a property."""

    factor = property(lambda _: FACTOR)


of_a_class = Settings("of_a_class")
vars(of_a_class)["factor"] = 7.0
that_makes = types.ModuleType("that_makes")
that_makes.__getattr__ = lambda _: FACTOR
that_lacks = types.ModuleType("that_lacks")


def reads_a_module_of_a_class(k, x):
    return scaled(k, x, of_a_class.factor)


def reads_what_a_module_makes(k, x):
    torch._check(x.dim() == 1)
    return scaled(k, x, that_makes.factor)


def reads_what_a_module_lacks(k, x):
    return scaled(k, x, that_lacks.factor if x.dim() == 2 else 2.0)


@pytest.mark.long
def test_a_name_that_a_module_comes_to_have_is_seen(declare, monkeypatch):
    op = declare(reads_what_a_module_lacks)
    serves(op, 2.0)
    with monkeypatch.context() as patch:
        patch.setattr(that_lacks, "__getattr__", lambda _: 3.0, raising=False)
        assert value(op, torch.ones(1, 1)) == (3.0, False)
    monkeypatch.setattr(that_lacks, "factor", 5.0, raising=False)
    assert value(op, torch.ones(1, 1)) == (5.0, False)
    serves(op, 5.0, torch.ones(1, 1))


def reads_an_object(k, x):
    return scaled(k, x, settings.factor)


def reads_a_list(k, x):
    return scaled(k, x, LISTED[0])


def reads_a_class_of_torch(k, x):
    return scaled(k, x, torch.Tensor.block_size)


def reads_another_name_of_a_class(k, x):
    kind = torch.Tensor
    return scaled(k, x, kind.block_size)


def reads_a_class(k, x):
    return scaled(k, x, Thrice.block_size)


def reads_an_attribute_of_a_function(k, x):
    return scaled(k, x, with_attribute.factor)


def draws(k, x):
    return scaled(k, x, float(random.random() < 2) * 2)


def asks_for_a_mode(k, x):
    return scaled(k, x, 2.0 if torch.is_grad_enabled() else 3.0)


@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        (
            reads_an_object,
            "`settings`, of type SimpleNamespace, cannot be traced: it can change unseen",
        ),
        (reads_a_module_of_a_class, "`of_a_class` cannot be traced"),
        (reads_what_a_module_makes, "`factor`, which the module `that_makes` does not have"),
        (reads_a_class_of_torch, "`block_size` of the class torch.Tensor cannot be traced"),
        (reads_another_name_of_a_class, "`block_size` of the class torch.Tensor cannot be traced"),
        (reads_a_class, "`Thrice` cannot be traced"),
        (reads_a_list, "`LISTED`, of type list, cannot be traced: it can change unseen"),
        (
            reads_an_attribute_of_a_function,
            "`factor` of the function `with_attribute` cannot be traced",
        ),
        (draws, "`random.random` cannot be traced"),
        (asks_for_a_mode, "`torch.is_grad_enabled` cannot be traced"),
    ],
)
def test_what_can_change_unseen_keeps_a_call_in_python(declare, monkeypatch, launch, reason):
    for kind in (torch.Tensor, Thrice):
        monkeypatch.setattr(kind, "block_size", 2.0, raising=False)
    op = declare(launch)
    for _ in range(3):
        assert value(op) == (2.0, False)
    (told,) = programs_of(op).refused.values()
    *_, (*_, last) = launch.__code__.co_lines()
    assert reason in told and f"{__file__}:{last}: " in told


MODES = {
    "grad": (asks_for_a_mode, torch.no_grad),
    "default dtype": (
        lambda k, x: scaled(k, torch.zeros(x.shape), 1.0),
        lambda: set_for_a_while(torch.set_default_dtype, torch.float64, torch.float32),
    ),
    "default dtype of finfo": (
        lambda k, x: scaled(k, x, torch.finfo().eps),
        lambda: set_for_a_while(torch.set_default_dtype, torch.float64, torch.float32),
    ),
    "deterministic": (
        lambda k, x: torch.empty_like(x),
        lambda: set_for_a_while(torch.use_deterministic_algorithms, True, False),
    ),
}


class set_for_a_while:  # noqa: N801
    def __init__(self, function, value, before):
        self.function, self.value, self.before = function, value, before

    def __enter__(self):
        self.function(self.value)

    def __exit__(self, *_):
        self.function(self.before)


@pytest.mark.long
@pytest.mark.parametrize("name", MODES)
def test_a_mode_of_torch_is_seen_by_the_next_call(declare, name):
    launch, mode = MODES[name]
    op, x = declare(launch), torch.ones(1000)
    for _ in range(2):
        op(x)
        specializer.settle()
    with mode():
        found, wanted = op(x), torch.empty_like(x)
        if name == "grad":
            assert found[0] == 3
        elif name == "default dtype":
            assert found.dtype == torch.float64
        elif name == "default dtype of finfo":
            assert found[0] == torch.finfo(torch.float64).eps
        else:
            assert wanted.isnan().all() and found.isnan().all()


def wrapped(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)

    return inner


def by_identity(k, x, y):
    return scaled(k, x, 7.0 if x is y else 1.0)


ASKED = {
    "itself": by_identity,
    "helper": lambda k, x, y: scaled(k, x, 7.0 if same(x, y) else 1.0),
    "id": lambda k, x, y: scaled(k, x, 7.0 if id(x) == id(y) else 1.0),
    "operator": lambda k, x, y: scaled(k, x, 7.0 if operator.is_(x, y) else 1.0),
    "a branch": lambda k, x, y: scaled(k, x, 7.0 if x is (y if x.dim() else None) else 1.0),
    "dict": lambda k, x, y: scaled(k, x, 7.0 if len({x: 1, y: 2}) == 1 else 1.0),
    "set": lambda k, x, y: scaled(k, x, 7.0 if len({x, y}) == 1 else 1.0),
    "no_grad": torch.no_grad()(by_identity),
    "wraps": wrapped(by_identity),
    "partial": functools.partial(by_identity),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("same_first", [False, True])
def test_whether_two_tensors_are_one_is_told_apart(declare, name, same_first):
    op = declare(ASKED[name], "(Tensor x, Tensor y) -> Tensor")
    x, y = torch.ones(2), torch.ones(2)
    for a, b in ((x, x), (x, y)) if same_first else ((x, y), (x, x)):
        for _ in range(3):
            assert value(op, a, b)[0] == (7.0 if a is b else 1.0)


IS_WEIGHT = {
    "global": lambda k, x: scaled(k, x, 7.0 if x is WEIGHT else 1.0),
    "default": lambda k, x, weight=WEIGHT: scaled(k, x, 7.0 if x is weight else 1.0),
    "helper": lambda k, x: scaled(k, x, 7.0 if same(WEIGHT, x) else 1.0),
}


@pytest.mark.parametrize("name", IS_WEIGHT)
@pytest.mark.parametrize("same_first", [False, True])
def test_an_argument_that_is_a_tensor_of_the_module_is_noticed(declare, name, same_first):
    op = declare(IS_WEIGHT[name])
    for x in (WEIGHT, torch.ones(2)) if same_first else (torch.ones(2), WEIGHT):
        for _ in range(3):
            assert value(op, x)[0] == (7.0 if x is WEIGHT else 1.0)


def test_tensors_given_twice_need_no_program_of_their_own(declare):
    op = declare(lambda k, x, y: scaled(k, x, 2.0), "(Tensor x, Tensor y) -> Tensor")
    x, y = torch.ones(2), torch.ones(2)
    serves(op, 2.0, x, y)
    assert value(op, x, x) == (2.0, True)


@pytest.mark.parametrize(
    ("compute", "expected"), [(lambda xs: 2.0 if type(xs) is list else 9.0, 2.0), (length_of, 2.0)]
)
def test_a_list_of_tensors_is_a_list(declare, compute, expected):
    op = declare(lambda k, xs: scaled(k, xs[0], compute(xs)), "(Tensor[] xs) -> Tensor")
    for _ in range(3):
        assert value(op, [torch.ones(2), torch.ones(2)])[0] == expected


KINDS = {
    "alone": lambda x: isinstance(x, torch.Tensor),
    "in a tuple": lambda x: isinstance(x, (int, torch.Tensor)),
    "in a union": lambda x: isinstance(x, torch.Tensor | None),
    "of a list": lambda x: not isinstance([x], torch.Tensor),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_tensor_is_of_its_class(declare, name):
    is_of_it = KINDS[name]
    serves(declare(lambda k, x: scaled(k, x, 2.0 if is_of_it(x) else 3.0)), 2.0)


TEXTS = {
    "str": str, "repr": lambda x: repr([x]), "format": lambda x: f"{x}", "percent": lambda x: "%s" % (x,),  # noqa: UP031
    "width": lambda x: f"{x!s:>9}", "call": "{}".format, "in a tuple": lambda x: str((1, x)),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("listed", [False, True])
def test_the_text_of_a_tensor_keeps_a_call_in_python(declare, name, listed):
    text = TEXTS[name]
    op = declare(
        lambda k, x: scaled(k, x[0] if listed else x, 3.0 if "nan" in text(x) else 2.0),
        "(Tensor[] x) -> Tensor" if listed else "(Tensor x) -> Tensor",
    )
    one, other = torch.ones(2), torch.tensor([1.0, float("nan")])
    assert value(op, [one] if listed else one) == (2.0, False)
    assert value(op, [one] if listed else one) == (2.0, False)
    result = op([other] if listed else other)
    assert result[0] == 3.0


class Sub(torch.Tensor):
    """A tensor of a class of its own."""


def inverted(n):
    try:
        return ~n
    except TypeError:
        return 5


OFFSET = torch.ones(2)
OFFSET.offset = OFFSET._offset = 5.0
ANSWERS = {  # a number of x and n, the first call and a later one, and the answer to that
    "subclass": (lambda x, n: 7.0 if isinstance(x, Sub) else 1.0, torch.ones(2), torch.ones(2).as_subclass(Sub), 7),
    "type": (lambda x, n: 7.0 if type(x) is torch.Tensor else 1.0, torch.ones(2), torch.nn.Parameter(torch.ones(2), requires_grad=False), 1),
    "attribute": (lambda x, n: x.offset, OFFSET, OFFSET, 5),
    "attribute of a name of ours": (lambda x, n: x._offset, OFFSET, OFFSET, 5),
    "attribute of a branch": (lambda x, n: (x if n else settings)._offset, OFFSET, OFFSET, 5),
    "hasattr": (lambda x, n: 7.0 if hasattr(x, "memory") else 1.0, torch.ones(2), torch.ones(2), 1),
    "method of a number": (lambda x, n: 7.0 if hasattr(n, "bit_count") else 1.0, torch.ones(2), torch.ones(2), 7),
    "invert": (lambda x, n: 1.0 * inverted(n), torch.ones(2), torch.ones(2), -4),
    "detach": (lambda x, n: 7.0 if x.detach() is x else 1.0, torch.ones(2), torch.ones(2), 1),
    "slice": (lambda x, n: 7.0 if x[:] is x else 1.0, torch.ones(2), torch.ones(2), 1),
    "flatten": (lambda x, n: 7.0 if x.flatten() is x else 1.0, torch.ones(2), torch.ones(2), 7),
    "type of a number": (lambda x, n: 7.0 if type(n) is int else 1.0, torch.ones(2), torch.ones(2), 7),
    "new_empty": (lambda x, n: 1.0 * x.new_empty(3, dtype=None).itemsize, torch.ones(2).double(), torch.ones(2).double(), 8),
    "type of strides": (lambda x, n: 7.0 if type(x.stride()) is tuple else 1.0, torch.ones(2), torch.ones(2), 7),
    "text of strides": (lambda x, n: 1.0 * len(str(x.stride())), torch.ones(2), torch.ones(2), 4),
    "shape after a tuple": (lambda x, n: 7.0 if type((n,) + x.shape) is torch.Size else 1.0, torch.ones(2), torch.ones(2), 7),
    "square": (lambda x, n: (7.2249061795510094 + 0.0 * n) ** 2, torch.ones(2).double(), torch.ones(2).double(), 7.2249061795510094**2),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", ANSWERS)
def test_tensors_and_numbers_are_traced_as_in_python(declare, name):
    compute, first, later, expected = ANSWERS[name]
    op = declare(lambda k, x, n: scaled(k, x, compute(x, n)), "(Tensor x, int n) -> Tensor")
    value(op, first, 3)
    for _ in range(2):
        assert value(op, later, 3)[0] == pytest.approx(expected, rel=0, abs=0)


@pytest.mark.long
def test_an_op_called_like_a_method_is_not_taken_for_it(declare):
    library = torch.library.Library(f"jitkern_like{next(_number)}", "DEF")
    for name, function in (("clone", lambda x: x * 10), ("zeros_like", lambda x: x * 5)):
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, function, "CPU")
    ops = getattr(torch.ops, library.ns)
    for name, expected in (("clone", 10.0), ("zeros_like", 5.0)):
        op = declare(lambda k, x, name=name: scaled(k, getattr(ops, name)(x), 1.0))
        for _ in range(3):
            assert value(op)[0] == expected


@pytest.mark.long
def test_a_launch_function_declared_again_is_the_one_that_runs(declare):
    op = declare(lambda k, x: scaled(k, x, 2.0))
    serves(op, 2.0)
    op.launch("cpu")(lambda k, x: scaled(k, x, 3.0))
    assert value(op) == (3.0, False)
    serves(op, 3.0)


@pytest.mark.long
def test_a_trace_of_an_earlier_launch_function_never_serves(declare, monkeypatch):
    op, trace = declare(lambda k, x: scaled(k, x, 2.0)), specializer.trace

    def trace_late(*rest):
        op.launch("cpu")(lambda k, x: scaled(k, x, 3.0))
        return trace(*rest)

    monkeypatch.setattr(specializer, "trace", trace_late)
    assert op(torch.ones(2))[0].item() == 2.0
    monkeypatch.setattr(specializer, "trace", trace)
    assert value(op) == (3.0, False)
    serves(op, 3.0)


@pytest.mark.long
def test_configurations_declared_again_are_taken(declare):
    op = declare(lambda k, x: scaled(k, x, k.config["f"]))
    op.tune("cpu")(lambda x: [{"f": 2.0}])
    serves(op, 2.0)
    op.tune("cpu")(lambda x: [{"f": 3.0}])
    serves(op, 3.0)


def test_a_memo_holds_numbers_of_real_calls_alone(declare):
    memo = {}

    def blocks(n):
        if len(memo) > 2:
            memo.clear()
        if n not in memo:
            memo[n] = (n + 255) // 256
        return memo[n]

    op = declare(lambda k, x: scaled(k, x, 1.0 * blocks(x.shape[0])))
    y = torch.ones(3000)
    for x in (y[:1000], y[:2000], y, y.double(), y[:, None]):
        assert value(op, x)[0] == (x.shape[0] + 255) // 256
    assert all(type(n) is int for n in memo)


def test_a_world_is_the_same_for_equal_code_and_values():
    def made(factor):
        def launch(k, x):
            return scaled(k, x, factor)

        return Scope([launch])

    assert made(2.0).identity == made(2.0).identity
    assert len({made(value).identity for value in (2.0, 3.0, 2, True, "2.0", None, (2.0,))}) == 7
