"""Launch functions that do what C cannot follow: the answers stay right, and the op says why."""

import contextlib
import copy
import fractions
import functools
import json
import math
import numbers
import operator
import re
import struct

import pytest
import torch
from subject import Subject, length_of

from jitkern.launch.symbols import Unsupported
from jitkern.runtime import specializer
from jitkern.trace.trace import trace

pytestmark = pytest.mark.common_cache
SIGNATURE = "(Tensor x, Tensor y, int n, float f) -> Tensor"
WEIGHTS = torch.arange(1.0, 33.0)
TABLE = {3: 30.0, 5: 50.0}
MEMO: dict[object, object] = {}
HELPERS = {"space": torch.empty}
LISTED = [1, 2]
MANY = {i: float(i) for i in range(200)}


def vector(*values):
    return torch.tensor(values)


FOUR, OTHER = vector(1.0, -2.0, 3.0, 4.0), vector(2.0, 2.0, 2.0, 2.0)
CALLS = [
    (FOUR, FOUR, 5, 2.5),
    (FOUR, OTHER, 5, 2.5),
    (torch.arange(1.0, 8.0), torch.ones(7), 3, -1.5),
    (vector(0.0), vector(0.0), 0, 0.0),
    (OTHER, FOUR, -2, 1e300),
    (vector(0.0, 1.0, 2.5, 3.0, 9.0, -1.0, 5.0, 6.0, 7.0), torch.ones(9), 8, math.inf),
    (vector(-1.0, 2.0), vector(2.0, 1.0), 1, -0.0),
    (vector(2.5, 5.0, 1.0), vector(5.0, 5.0, 5.0), 70, math.nan),
    (torch.empty(0), torch.empty(0), 6, 1.0),
]


def scaled(k, x, a):
    out = torch.empty_like(x)
    k.axpy[{"T": x.dtype}](out, a, x, None, x.numel())
    return out


def tagged():
    """Have an attribute."""


tagged.by = 4.0


def attribute_of_a_function(function):
    try:
        return function.by
    except AttributeError:
        return 1.0


def scaled_by(compute):
    return lambda k, x, y, n, f: scaled(k, x, compute(k, x, y, n, f))


def tried(compute, *errors):
    """What `compute` returns, or 0 where it raises one of these."""
    try:
        return compute()
    except errors:
        return 0


def relu_or_x(x, *errors):
    try:
        return torch.relu(x)
    except errors:
        return x


def relu_unless_it_fails(x):
    y = x
    with contextlib.suppress(Exception):
        y = torch.relu(x)
    return y


def size_by_a_bare_except(x):
    try:
        return float(x.storage_offset() + x.sum())
    except:  # noqa: E722
        return -1.0


def size_after_a_finally(x):
    try:
        y = torch.relu(x)
    finally:
        x.numel()
    return y


def matched(n):
    match n:
        case 3 | 5:
            return 1.0
        case int() if n < 0:
            return 2.0
        case int():
            return 3.0
    return 4.0


def value_of_1(table):
    match table:
        case {1: found}:
            return found
    return 9.0


def counted(n):
    total = 0
    for i in range(n):
        total += i
    return float(total)


def rows_of(x):
    total = 0.0
    for row in x:
        total += float(row)
    return total


def first_of(x):
    for row in x:
        return row
    return None


def memorised(key, value):
    if key not in MEMO:
        MEMO[key] = value
    return MEMO[key]


@functools.cache
def remembered(n):
    return n * 2 + 1


@functools.lru_cache(maxsize=None, typed=True)
def remembered_by_type(n):
    return n * 2 + 1


def nested(n):
    def inner():
        return torch.empty(n if n > 0 else 1)

    return inner()


# Each takes k, x, y, n and f, and returns a tensor.
TENSORS = {
    "relu": lambda k, x, y, n, f: scaled(k, torch.relu(x), 2.0),
    "functional": lambda k, x, y, n, f: scaled(k, torch.nn.functional.relu(x), 2.0),
    "plus": lambda k, x, y, n, f: scaled(k, x + 1, 2.0),
    "rplus": lambda k, x, y, n, f: scaled(k, 1 + x, 2.0),
    "times_n": lambda k, x, y, n, f: scaled(k, n * x, 2.0),
    "minus": lambda k, x, y, n, f: scaled(k, -x, 2.0),
    "matmul": lambda k, x, y, n, f: scaled(k, (x @ y).view(1), 2.0),
    "iadd": lambda k, x, y, n, f: scaled(k, operator.iadd(x.clone(), 1), 2.0),
    "setitem": lambda k, x, y, n, f: scaled(k, operator.setitem(x.clone(), 0, 5.0) or x, 2.0),
    "add_": lambda k, x, y, n, f: scaled(k, x.clone().add_(1), 2.0),
    "fill_": lambda k, x, y, n, f: torch.empty_like(x).fill_(n),
    "copy_a_number": lambda k, x, y, n, f: torch.empty_like(x).copy_(torch.tensor(3.0)),
    "sum": lambda k, x, y, n, f: scaled(k, x, x.sum().item()),
    "torch_sum": lambda k, x, y, n, f: scaled(k, x, float(torch.sum(x))),
    "max": lambda k, x, y, n, f: scaled(k, x, float(x.max()) if x.numel() else 0.0),
    "item": lambda k, x, y, n, f: scaled(k, x, x[0].item()),
    "float_of_an_element": lambda k, x, y, n, f: scaled(k, x, float(x[0])),
    "int_of_an_element": lambda k, x, y, n, f: scaled(k, x, int(x[0])),
    "an_element_as_a_number": lambda k, x, y, n, f: scaled(k, x, x[0] * 1.0),
    "bool": lambda k, x, y, n, f: scaled(k, x, 2.0 if x[0] else 3.0),
    "not": lambda k, x, y, n, f: scaled(k, x, 2.0 if not x[0] else 3.0),
    "less": lambda k, x, y, n, f: scaled(k, x, 2.0 if x[0] < f else 3.0),
    "equal": lambda k, x, y, n, f: scaled(k, x, 2.0 if x[0] == 0 else 3.0),
    "unequal": lambda k, x, y, n, f: scaled(k, x, 2.0 if x[0] != 0 else 3.0),
    "equal_tensors": lambda k, x, y, n, f: scaled(k, x, 2.0 if x[:1] == y[:1] else 3.0),
    "element_in": lambda k, x, y, n, f: scaled(k, x, 2.0 if x[0] in (1.0, 2.5) else 3.0),
    "contains": lambda k, x, y, n, f: scaled(k, x, 2.0 if 2.5 in x else 3.0),
    "torch_equal": lambda k, x, y, n, f: scaled(k, x, 2.0 if torch.equal(x, y) else 3.0),
    "same_tensor": lambda k, x, y, n, f: scaled(k, x, 2.0 if x is y else 3.0),
    "len": lambda k, x, y, n, f: scaled(k, x, len(x)),
    "len_of_shape": lambda k, x, y, n, f: scaled(k, x, len(x.shape)),
    "tolist": lambda k, x, y, n, f: scaled(k, x, sum(x.tolist())),
    "iterate": lambda k, x, y, n, f: scaled(k, x, rows_of(x)),
    "first_row": lambda k, x, y, n, f: scaled(k, x, 1.0 if first_of(x) is None else 2.0),
    "unpack": lambda k, x, y, n, f: scaled(k, x, float(sum([*x], start=torch.zeros(())))),
    "storage_offset": lambda k, x, y, n, f: scaled(k, x, x.storage_offset()),
    "storage": lambda k, x, y, n, f: scaled(k, x, x.untyped_storage().nbytes()),
    "requires_grad": lambda k, x, y, n, f: scaled(k, x, 2.0 if x.requires_grad else 3.0),
    "version": lambda k, x, y, n, f: scaled(k, x, float(x._version)),
    "same_after_no_index": lambda k, x, y, n, f: scaled(k, x, 2.0 if (z := x.select(0, 0))[()] is z else 3.0),
    "type": lambda k, x, y, n, f: scaled(k, x, 2.0 if type(x) is torch.Tensor else 3.0),
    "isinstance": lambda k, x, y, n, f: scaled(k, x, 2.0 if isinstance(x, torch.Tensor) else 3.0),
    "class": lambda k, x, y, n, f: scaled(k, x, 2.0 if x.__class__ is torch.Tensor else 3.0),
    "is_tensor": lambda k, x, y, n, f: scaled(k, x, 2.0 if torch.is_tensor(x) else 3.0),
    "is_tensor_of_a_module_constant": lambda k, x, y, n, f: scaled(k, x, 2.0 if torch.is_tensor(WEIGHTS) else 3.0),
    "isinstance_of_shape": lambda k, x, y, n, f: scaled(k, x, 2.0 if isinstance(x.shape, torch.Size) else 3.0),
    "str_of_shape": lambda k, x, y, n, f: scaled(k, x, float(len(str(x.shape)))),
    "hasattr": lambda k, x, y, n, f: scaled(k, x, 2.0 if hasattr(x, "storage_offset") else 3.0),
    "hasattr_unknown": lambda k, x, y, n, f: scaled(k, x, 2.0 if hasattr(x, "of_no_tensor") else 3.0),
    "getattr": lambda k, x, y, n, f: scaled(k, x, 2.0 if getattr(x, "of_no_tensor", None) is None else 3.0),
    "callable": lambda k, x, y, n, f: scaled(k, x, 2.0 if callable(x) else 3.0),
    "set_of_tensors": lambda k, x, y, n, f: scaled(k, x, float(len({x, y}))),
    "copy": lambda k, x, y, n, f: scaled(k, copy.copy(x), 2.0),
    "deepcopy": lambda k, x, y, n, f: scaled(k, copy.deepcopy(x), 2.0),
    "device": lambda k, x, y, n, f: scaled(k, x, 2.0 if x.device.type == "cpu" and x.device == y.device else 3.0),
    "to_a_device": lambda k, x, y, n, f: scaled(k, x.to("cpu"), 2.0),
    "to_its_device": lambda k, x, y, n, f: scaled(k, x.to(x.device), 2.0),
    "to_device_and_dtype": lambda k, x, y, n, f: scaled(k, x.to(device="cpu", dtype=torch.float64), 2.0),
    "cpu": lambda k, x, y, n, f: scaled(k, x.cpu(), 2.0),
    "view_as_a_dtype": lambda k, x, y, n, f: scaled(k, x.view(torch.int32), 2.0),
    "step": lambda k, x, y, n, f: scaled(k, x[::2].contiguous(), 2.0),
    "mask": lambda k, x, y, n, f: scaled(k, x[x > 0], 2.0),
    "index_list": lambda k, x, y, n, f: scaled(k, x[[0]], 2.0),
    "split": lambda k, x, y, n, f: scaled(k, x.split(2)[0], 2.0),
    "cat": lambda k, x, y, n, f: scaled(k, torch.cat([x, y]), 2.0),
    "where": lambda k, x, y, n, f: scaled(k, torch.where(x > 0, x, y), 2.0),
    "numpy": lambda k, x, y, n, f: scaled(k, x, float(x.numpy()[0])),
    "relu_or_x": lambda k, x, y, n, f: scaled(k, relu_or_x(x, Exception), 2.0),
    "relu_or_x_on_a_runtime_error": lambda k, x, y, n, f: scaled(k, relu_or_x(x, RuntimeError), 2.0),
    "suppress": lambda k, x, y, n, f: scaled(k, relu_unless_it_fails(x), 2.0),
    "bare_except": lambda k, x, y, n, f: scaled(k, x, size_by_a_bare_except(x)),
    "finally": lambda k, x, y, n, f: scaled(k, size_after_a_finally(x), 2.0),
    "no_grad": lambda k, x, y, n, f: torch.no_grad()(lambda: scaled(k, x, 2.0))(),
}  # fmt: skip
MEMORY = {
    "arange": lambda k, x, y, n, f: scaled(k, torch.arange(4.0), 2.0),
    "arange_of_n": lambda k, x, y, n, f: scaled(k, torch.arange(float(max(n, 0))), 2.0),
    "arange_of_a_size": lambda k, x, y, n, f: scaled(k, torch.arange(x.shape[0], dtype=x.dtype), 2.0),
    "ones": lambda k, x, y, n, f: scaled(k, torch.ones(x.shape), 2.0),
    "full": lambda k, x, y, n, f: scaled(k, torch.full((3,), f), 2.0),
    "tensor_of_n": lambda k, x, y, n, f: scaled(k, torch.tensor([float(n)]), 2.0),
    "module_constant": lambda k, x, y, n, f: scaled(k, WEIGHTS, 2.0),
    "module_constant_sliced": lambda k, x, y, n, f: scaled(k, WEIGHTS[: x.shape[0]], 2.0),
    "element_of_a_module_constant": lambda k, x, y, n, f: scaled(k, x, float(WEIGHTS[n % 8])),
    "copy_a_module_constant": lambda k, x, y, n, f: torch.empty(32).copy_(WEIGHTS),
    "rand": lambda k, x, y, n, f: scaled(k, x, float(torch.rand(0).numel())),
    "return_a_module_constant": lambda k, x, y, n, f: WEIGHTS.clone(),
    "empty_of_a_tiny_dtype": lambda k, x, y, n, f: (torch.empty(4, dtype=torch.float8_e8m0fnu), scaled(k, x, 2.0))[1],
    "empty_on_meta": lambda k, x, y, n, f: scaled(k, x, float(torch.empty(3, device="meta").numel())),
    "empty_with_gradient": lambda k, x, y, n, f: (torch.empty(3, requires_grad=True), scaled(k, x, 2.0))[1],
    "empty_of_channels_last": lambda k, x, y, n, f: torch.empty(1, 2, 3, 4, memory_format=torch.channels_last).zero_(),
    "empty_pinned_not": lambda k, x, y, n, f: torch.empty(3, pin_memory=False).zero_(),
    "empty_of_a_float": lambda k, x, y, n, f: torch.empty(n / 1).zero_(),
    "empty_of_n": lambda k, x, y, n, f: torch.empty(n).zero_(),
    "empty_of_a_size": lambda k, x, y, n, f: torch.empty(torch.Size([x.shape[0], 2])).zero_(),
    "empty_in_a_closure": lambda k, x, y, n, f: nested(n).zero_(),
    "empty_by_a_helper_in_a_table": lambda k, x, y, n, f: HELPERS["space"](x.shape[0]).zero_(),
    "empty_with_out": lambda k, x, y, n, f: torch.empty(2, out=torch.zeros(2)).zero_(),
    "address_of_an_allocation": lambda k, x, y, n, f: scaled(k, x, 2.0 if torch.empty(x.shape[0] // 4).data_ptr() else 3.0),
    "address_is_0": lambda k, x, y, n, f: scaled(k, x, 2.0 if torch.empty(x.shape[0] // 4).data_ptr() == 0 else 3.0),
    "address_modulo_a_page": lambda k, x, y, n, f: scaled(k, x, 0.0 * (torch.empty(9).data_ptr() % 4096)),
    "address_as_an_argument": lambda k, x, y, n, f: scaled(k, x, 0.0 * torch.empty(9).data_ptr()),
    "address_given_to_a_kernel": lambda k, x, y, n, f: (k.ints(torch.empty(8, dtype=torch.int64), torch.empty(9).data_ptr(), *[0] * 7), scaled(k, x, 2.0))[1],
    "unknown_kernel_argument": lambda k, x, y, n, f: k.axpy[{"T": x.dtype}](x, 1.0, x, None, "many") or x,
}  # fmt: skip
NUMBERS = {
    "range_of_a_size": lambda k, x, y, n, f: sum(1.0 for _ in range(x.shape[0])),
    "range_of_n": lambda k, x, y, n, f: counted(n),
    "list_index": lambda k, x, y, n, f: [1.0, 2.0, 3.0, 4.0][x.shape[0] % 4],
    "list_index_n": lambda k, x, y, n, f: [1.0, 2.0, 3.0, 4.0][n % 4],
    "list_slice": lambda k, x, y, n, f: sum([1.0, 2.0, 3.0, 4.0][:n]),
    "list_times_n": lambda k, x, y, n, f: float(len([0] * n)),
    "str_times_n": lambda k, x, y, n, f: float(len("ab" * n)),
    "operator_index": lambda k, x, y, n, f: float(operator.index(n)),
    "shape_index": lambda k, x, y, n, f: float(x.shape[n % 1]),
    "int": lambda k, x, y, n, f: int(n) + 1.0,
    "float": lambda k, x, y, n, f: float(n) + float(x.shape[0]),
    "int_of_a_float": lambda k, x, y, n, f: float(int(f * 3)) if abs(f) < 1e9 else 0.0,
    "complex": lambda k, x, y, n, f: complex(n).real,
    "equal_to_a_complex_number": lambda k, x, y, n, f: (n == 5 + 0j) + 2.0 * (f != 2.5 + 0j),
    "in_complex_numbers": lambda k, x, y, n, f: 2.0 if n in (1j, 5 + 0j) else 3.0,
    "lookup_of_a_complex_number": lambda k, x, y, n, f: {5 + 0j: 2.0}.get(n, 3.0),
    "bool": lambda k, x, y, n, f: float(bool(n)),
    "isinstance": lambda k, x, y, n, f: 2.0 if isinstance(n, int) and isinstance(f, float) else 3.0,
    "isinstance_of_numbers": lambda k, x, y, n, f: 2.0 if isinstance(n, numbers.Integral) else 3.0,
    "isinstance_of_a_size": lambda k, x, y, n, f: 2.0 if isinstance(x.shape[0], int) else 3.0,
    "type_is_int": lambda k, x, y, n, f: 2.0 if type(n) is int else 3.0,
    "type_equals_int": lambda k, x, y, n, f: 2.0 if type(n) == int else 3.0,  # noqa: E721
    "type_is_float": lambda k, x, y, n, f: 2.0 if type(f) is float else 3.0,
    "type_in_a_table": lambda k, x, y, n, f: {int: 2.0, float: 3.0}.get(type(n), 4.0),
    "type_of_a_size": lambda k, x, y, n, f: 2.0 if type(x.shape[0]) is int else 3.0,
    "type_of_shape": lambda k, x, y, n, f: 2.0 if type(x.shape) is torch.Size else 3.0,
    "type_name": lambda k, x, y, n, f: float(len(type(n).__name__)),
    "class": lambda k, x, y, n, f: 2.0 if n.__class__ is int else 3.0,
    "type_of_a_list": lambda k, x, y, n, f: 2.0 if type(LISTED) is list else 3.0,
    "type_of_a_module_constant": lambda k, x, y, n, f: 2.0 if type(WEIGHTS) is torch.Tensor else 3.0,
    "type_of_a_function": lambda k, x, y, n, f: float(len(str(type(len)))),
    "type_of_an_address": lambda k, x, y, n, f: 2.0 if type(torch.empty(9).data_ptr()) is int else 3.0,
    "isinstance_of_an_address": lambda k, x, y, n, f: 2.0 if isinstance(torch.empty(9).data_ptr(), int) else 3.0,
    "match": lambda k, x, y, n, f: matched(n),
    "match_a_shape": lambda k, x, y, n, f: length_of(x.shape),
    "match_a_list": lambda k, x, y, n, f: length_of(LISTED),
    "match_a_large_dict": lambda k, x, y, n, f: value_of_1(MANY),
    "hash": lambda k, x, y, n, f: float(hash(n)),
    "hash_of_shape": lambda k, x, y, n, f: float(hash(tuple(x.shape)) % 97),
    "lookup": lambda k, x, y, n, f: TABLE.get(n, 1.0),
    "lookup_of_a_size": lambda k, x, y, n, f: {(4,): 2.0, (7,): 3.0}.get(tuple(x.shape), 4.0),
    "lookup_of_a_shape": lambda k, x, y, n, f: {torch.Size([4]): 2.0, (7,): 3.0}.get(x.shape, 4.0),
    "key_error": lambda k, x, y, n, f: tried(lambda: TABLE[n], KeyError),
    "f_string": lambda k, x, y, n, f: float(len(f"{n}x{x.shape[0]:>4}")),
    "percent": lambda k, x, y, n, f: float(len("%d of %s" % (n, x.shape[0]))),  # noqa: UP031
    "str": lambda k, x, y, n, f: float(len(str(n) + repr(f))),
    "json": lambda k, x, y, n, f: float(len(json.dumps([n, x.shape[0]]))),
    "bin": lambda k, x, y, n, f: float(len(bin(n))),
    "chr": lambda k, x, y, n, f: float(ord(chr(n + 65))),
    "pack": lambda k, x, y, n, f: float(len(struct.pack("q", n))),
    "to_bytes": lambda k, x, y, n, f: float(len((n & 255).to_bytes(2, "little"))),
    "sqrt": lambda k, x, y, n, f: math.sqrt(x.shape[0]),
    "isqrt": lambda k, x, y, n, f: float(math.isqrt(x.shape[0])),
    "gcd": lambda k, x, y, n, f: float(math.gcd(n, 4)),
    "log2": lambda k, x, y, n, f: math.log2(x.shape[0] + 1),
    "isnan": lambda k, x, y, n, f: 2.0 if math.isnan(f) else 3.0,
    "isinf": lambda k, x, y, n, f: 2.0 if math.isinf(f) else 3.0,
    "copysign": lambda k, x, y, n, f: math.copysign(1.0, f),
    "not_itself": lambda k, x, y, n, f: 2.0 if f != f else 3.0,  # noqa: PLR0124
    "round": lambda k, x, y, n, f: float(round(n / 4)),
    "round_digits": lambda k, x, y, n, f: round(f, 1),
    "float_floordiv": lambda k, x, y, n, f: f // 2.0,
    "float_mod": lambda k, x, y, n, f: (n + 0.5) % 2.0,
    "float_divmod": lambda k, x, y, n, f: divmod(n + 0.5, 2)[1],
    "float_power": lambda k, x, y, n, f: (x.shape[0] + 0.5) ** 0.5,
    "power_of_n": lambda k, x, y, n, f: 2.0 ** (n % 5),
    "power_modulo": lambda k, x, y, n, f: float(pow(x.shape[0], 2, 5)),
    "power_of_1": lambda k, x, y, n, f: float(pow(n, 1, 3)),
    "invert": lambda k, x, y, n, f: float(~n),
    "bit_count": lambda k, x, y, n, f: float(n.bit_count()),
    "is_integer": lambda k, x, y, n, f: 2.0 if f.is_integer() else 3.0,
    "as_integer_ratio": lambda k, x, y, n, f: float(n.as_integer_ratio()[0]),
    "numerator": lambda k, x, y, n, f: float(n.numerator),
    "fraction": lambda k, x, y, n, f: float(fractions.Fraction(n, 3)),
    "copy": lambda k, x, y, n, f: copy.deepcopy(n) + 1.0,
    "big_integer": lambda k, x, y, n, f: float(n * 10**30),
    "big_shift": lambda k, x, y, n, f: float((n << 80) >> 80),
    "bit_length": lambda k, x, y, n, f: float(n.bit_length()),
    "zero_division": lambda k, x, y, n, f: float(tried(lambda: 12 // n, ZeroDivisionError)),
    "float_zero_division": lambda k, x, y, n, f: tried(lambda: 1.0 / f, ZeroDivisionError) * 1.0,
    "modulo_zero": lambda k, x, y, n, f: float(tried(lambda: 12 % n, ZeroDivisionError)),
    "negative_shift": lambda k, x, y, n, f: float(tried(lambda: 1 << (n & 15) - 2, ValueError)),
    "overflow": lambda k, x, y, n, f: float(tried(lambda: f**2, OverflowError)),
    "floor_of_infinity": lambda k, x, y, n, f: tried(lambda: math.floor(f), OverflowError, ValueError) * 1.0,
    "int_of_infinity": lambda k, x, y, n, f: tried(lambda: int(f), OverflowError, ValueError) * 1.0,
    "attribute_of_a_function": lambda k, x, y, n, f: attribute_of_a_function(tagged),
    "any_error": lambda k, x, y, n, f: float(tried(lambda: x.storage_offset() + 7, Exception)),
    "index_error": lambda k, x, y, n, f: float(tried(lambda: x[n].dim() + 5, IndexError)),
    "length_of_a_list_of_n": lambda k, x, y, n, f: float(tried(lambda: len([0] * n) + 1, Exception)),
    "an_assertion": lambda k, x, y, n, f: float(tried(lambda: operator.truediv(1, n > 2), ZeroDivisionError)),
    "memo_of_n": lambda k, x, y, n, f: float(memorised(n, 2 * n)),
    "memo_of_shape": lambda k, x, y, n, f: float(memorised(tuple(x.shape), x.shape[0] + 1)),
    "lru_cache": lambda k, x, y, n, f: float(remembered(n)),
    "lru_cache_by_type": lambda k, x, y, n, f: remembered_by_type(n) * 1.0,
    "broadcast_shapes": lambda k, x, y, n, f: float(torch.broadcast_shapes(x.shape, (1,))[0]),
    "torch_size": lambda k, x, y, n, f: float(torch.Size(x.shape).numel()),
    "finfo": lambda k, x, y, n, f: torch.finfo(x.dtype).eps * x.shape[0],
    "promote": lambda k, x, y, n, f: float(torch.promote_types(x.dtype, torch.float64).itemsize),
    "result_type": lambda k, x, y, n, f: float(torch.result_type(x, y).itemsize),
    "launched": lambda k, x, y, n, f: float(k.launched),
    "eval": lambda k, x, y, n, f: eval("n + 1.5", {}, {"n": n}),
    "sum_of_shape": lambda k, x, y, n, f: float(sum(x.shape)),
    "sorted": lambda k, x, y, n, f: float(sorted([n, x.shape[0], 4])[1]),
    "format_spec": lambda k, x, y, n, f: float(len(f"{f:{x.shape[0]}.2f}")),
    "enumerate": lambda k, x, y, n, f: float(sum(i * s for i, s in enumerate(x.shape, start=2))),
    "ternary": lambda k, x, y, n, f: f if x.shape[0] == y.shape[0] and not n < 0 else 3.0,
}  # fmt: skip
MUTATIONS = {
    **{f"tensor_{name}": launch for name, launch in TENSORS.items()},
    **{f"memory_{name}": launch for name, launch in MEMORY.items()},
    **{f"number_{name}": scaled_by(compute) for name, compute in NUMBERS.items()},
}
OF_STEPS = [
    "range_of_a_size",
    "range_of_n",
    "list_index",
    "list_index_n",
    "list_slice",
    "list_times_n",
    "str_times_n",
    "operator_index",
]
PLACE = re.compile(rf"{re.escape(__file__)}:\d+: ")


@pytest.fixture(autouse=True)
def _forgetful():
    MEMO.clear()


@pytest.fixture
def exercised(tmp_path):
    """An op with this launch function, after calls in this order that agree with Python's answers."""

    def make(launch, calls):
        made = Subject(tmp_path / "k", SIGNATURE, launch)
        for call in [*calls, *calls]:
            made.agrees(*call)
            specializer.settle()
        return made

    return make


@pytest.mark.long
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("name", MUTATIONS)
def test_what_c_cannot_follow_is_answered_as_in_python(exercised, name, reverse):
    made = exercised(MUTATIONS[name], CALLS[::-1] if reverse else CALLS)
    answered = []
    for call in CALLS[1:5]:
        with contextlib.suppress(Exception):
            made.op(*call)
            answered.append(call)
    specializer.settle()
    before = made.misses
    for call in answered:
        made.op(*call)
    served = made.misses == before
    specializer.settle()  # why a call was not served is found out beside it
    assert all(PLACE.match(reason) for reason in made.refusals), made.refusals
    assert served or made.refusals


@pytest.mark.parametrize("name", OF_STEPS)
def test_a_number_of_steps_says_that_it_is_a_range_or_an_index(exercised, name):
    made = exercised(MUTATIONS[f"number_{name}"], CALLS[:3])
    assert made.refusals
    for reason in made.refusals:
        assert re.search(r"in range\(\) or as an index", reason), reason


def test_a_refusal_names_the_argument(exercised):
    (reason,) = exercised(MUTATIONS["number_list_times_n"], CALLS[:2]).refusals
    assert "`n` in range() or as an index cannot be traced" in reason


@pytest.mark.long
def test_what_c_always_leaves_to_python_is_not_traced_for_ever(tmp_path, monkeypatch):
    traces = []
    trace = specializer.trace
    monkeypatch.setattr(specializer, "trace", lambda *args: traces.append(args) or trace(*args))
    made = Subject(tmp_path / "k", SIGNATURE, lambda k, x, y, n, f: scaled(k, x, (n << 80) >> 80))
    for _ in range(10):
        made.agrees(FOUR, FOUR, 0, 1.0)
        specializer.settle()
    assert len(traces) < 7
    (reason,) = made.refusals
    assert PLACE.match(reason)
    assert "rejected this one (for example because of an integer overflow)" in reason


@pytest.mark.long
def test_a_long_loop_is_refused_and_a_short_one_served(tmp_path):
    def launch(k, x, n):
        divisor = 2
        while n % divisor:
            divisor += 1
        return scaled(k, x, divisor)

    made = Subject(tmp_path / "k", "(Tensor x, int n) -> Tensor", launch)
    made.asks_python(FOUR, 1009)
    specializer.settle()
    (reason,) = made.refusals
    line = launch.__code__.co_firstlineno + 2
    assert reason.startswith(f"{__file__}:{line}: more than 1000 steps cannot be traced"), reason
    made.learns(FOUR, 101)
    made.serves(FOUR, 101)


BEYOND = {
    "permute": lambda x: x.permute(1, 0),
    "permute twice": lambda x: x.permute(1, 0, 0),
    "transpose": lambda x: x.transpose(0, 3),
    "expand": lambda x: x.expand(3, 4),
    "unsqueeze": lambda x: x.unsqueeze(5),
    "unsqueeze a text": lambda x: x.unsqueeze("1"),
    "flatten": lambda x: x[:, :1, :1].flatten(2, 1),
    "size": lambda x: x.size("1"),
    "stride": lambda x: x.stride(3),
}


@pytest.mark.parametrize("name", BEYOND)
def test_what_a_tensor_does_not_take_a_trace_does_not_take(subject, name):
    x, beyond = torch.ones(2, 3, 4), BEYOND[name]
    with pytest.raises((IndexError, RuntimeError, TypeError)):
        beyond(x)

    def launch(k, x):
        beyond(x)
        return scaled(k, x, 2.0)

    made = subject("(Tensor x) -> Tensor", launch)
    with pytest.raises(Unsupported, match="cannot be traced"):
        trace(made.op.signature, launch, (x,), frozenset(), x.device, made.runner)


@pytest.mark.parametrize("listed", ["", "[]"], ids=["a tensor", "a list"])
@pytest.mark.parametrize("change", [lambda x: x.zero_(), lambda x: x[1:].copy_(x[:-1])])
def test_a_program_changes_what_the_schema_has_as_changed(subject, listed, change):
    def launch(k, x):
        x = x[0] if listed else x
        change(x)
        return torch.empty_like(x)

    call = ([torch.ones(3)] if listed else torch.ones(3),)
    for alias in ("(a!)", ""):
        made = subject(f"(Tensor{alias}{listed} x) -> Tensor", launch)
        with contextlib.nullcontext() if alias else pytest.raises(Unsupported, match="as changed"):
            trace(made.op.signature, launch, call, frozenset(), torch.device("cpu"), made.runner)


@pytest.mark.long
def test_a_refusal_is_of_its_class_only(tmp_path):
    def launch(k, x, n):
        return scaled(k, torch.relu(x) if x.dim() == 2 else x, 2.0)

    made = Subject(tmp_path / "k", "(Tensor x, int n) -> Tensor", launch)
    made.asks_python(torch.ones(2, 2), 1)
    made.learns(torch.ones(4), 1)
    made.asks_python(torch.ones(2, 2), 1)
