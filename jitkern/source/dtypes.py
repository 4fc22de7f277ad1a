"""Element types: one table of what each language calls them, and of how C passes them."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from jitkern.named_tuple import NamedTuple

Constant = str | int | float | bool  # a template argument, see `constants`: a str is a text

_F32 = 2**128 - 2**103  # the least integer that rounds to infinity
_F64 = 2**1024 - 2**970


class Dtype(NamedTuple):
    """An element type.

    torch, cuda, host, triton: its names in Torch, in CUDA C++, in C++ for the CPU ("": unknown
    there), and in Triton's signatures. language: its name in `triton.language`.
    number: Torch's number for it (c10::ScalarType).
    ctype: its type in ctypes; None if it is passed in tensors only.
    limits: the least integer that a parameter of this type takes, and the first too large; (0, 0)
        if it takes no number.
    header, host_header: the headers that declare it in CUDA C++ and in C++ for the CPU, if any.
    """

    torch: str
    cuda: str
    host: str
    triton: str
    language: str
    number: int
    ctype: Any = None
    limits: tuple[int, int] = (0, 0)
    header: str = ""
    host_header: str = ""


def _integer(torch: str, c: str, number: int, ctype: Any) -> Dtype:
    bits = 8 * ctypes.sizeof(ctype)
    code = f"{torch[0]}{bits}"
    limits = (0, 2**bits) if code[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    return Dtype(torch, c, c, code, torch, number, ctype, limits)


DTYPES = {
    "f16": Dtype(
        "float16", "__half", "float16", "fp16", "float16", 5, header="cuda_fp16.h",
        host_header="float16.h",
    ),
    "bf16": Dtype(
        "bfloat16", "__nv_bfloat16", "bfloat16", "bf16", "bfloat16", 15, header="cuda_bf16.h",
        host_header="float16.h",
    ),
    "f32": Dtype(
        "float32", "float", "float", "fp32", "float32", 6, ctypes.c_float, (1 - _F32, _F32)
    ),
    "f64": Dtype(
        "float64", "double", "double", "fp64", "float64", 7, ctypes.c_double,
        (1 - _F64, _F64),
    ),
    "f8e4m3": Dtype(
        "float8_e4m3fn", "__nv_fp8_e4m3", "float8_e4m3fn", "fp8e4nv", "float8e4nv", 24,
        header="cuda_fp8.h", host_header="float16.h",
    ),
    "f8e5m2": Dtype(
        "float8_e5m2", "__nv_fp8_e5m2", "", "fp8e5", "float8e5", 23, header="cuda_fp8.h"
    ),
    "bool": Dtype("bool", "bool", "bool", "i1", "int1", 11, ctypes.c_bool),
    "i8": _integer("int8", "signed char", 1, ctypes.c_int8),
    "i16": _integer("int16", "short", 2, ctypes.c_int16),
    "i32": _integer("int32", "int", 3, ctypes.c_int32),
    "i64": _integer("int64", "long long", 4, ctypes.c_int64),
    "u8": _integer("uint8", "unsigned char", 0, ctypes.c_uint8),
    "u16": _integer("uint16", "unsigned short", 27, ctypes.c_uint16),
    "u32": _integer("uint32", "unsigned int", 28, ctypes.c_uint32),
    "u64": _integer("uint64", "unsigned long long", 29, ctypes.c_uint64),
}  # fmt: skip
TENSOR_MAP = "tensor_map"  # the code of a parameter that is a CUtensorMap by value
STREAM = "stream"  # what a program passes to host code that launches: the stream and its device
SYNONYMS = {"char": "i8", "long": "i64", "unsigned long": "u64"}  # other types of C like these


def table_of(code: str) -> tuple[str, int, int] | None:
    """Return the element type, capacity and bytes of a parameter that is a table of tensors.

    Such a parameter has the code `@f32:512` (`jitkern::Table<float, 512>`, see `tensor_table.h`) or
    `&f32:512` (`jitkern::Pointers`). Returns None for the code of another parameter.
    """
    if code[:1] not in ("@", "&"):
        return None
    element, _, capacity = code[1:].partition(":")
    count = int(capacity)
    return element, count, 20 * count + 8 if code[0] == "@" else 8 * count


@functools.cache
def codes_of_torch() -> dict[Any, str]:
    """Return the code of each dtype of Torch that kernels know."""
    import torch

    known = {code: getattr(torch, dtype.torch, None) for code, dtype in DTYPES.items()}
    return {dtype: code for code, dtype in known.items() if dtype}
