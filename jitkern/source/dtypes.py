"""Element types, by their short names."""

from __future__ import annotations

import ctypes
from typing import Any

from jitkern.named_tuple import NamedTuple


class Dtype(NamedTuple):
    """One element type, as Torch, CUDA C++, host C++ and Triton call it."""

    torch: str
    cuda: str
    host: str
    triton: str


DTYPES = {
    "f16": Dtype("float16", "__half", "float16", "fp16"),
    "bf16": Dtype("bfloat16", "__nv_bfloat16", "bfloat16", "bf16"),
    "f32": Dtype("float32", "float", "float", "fp32"),
    "f64": Dtype("float64", "double", "double", "fp64"),
    "f8e4m3": Dtype("float8_e4m3fn", "__nv_fp8_e4m3", "", "fp8e4nv"),
    "f8e5m2": Dtype("float8_e5m2", "__nv_fp8_e5m2", "", "fp8e5"),
    "bool": Dtype("bool", "bool", "bool", "i1"),
    "i8": Dtype("int8", "signed char", "signed char", "i8"),
    "i16": Dtype("int16", "short", "short", "i16"),
    "i32": Dtype("int32", "int", "int", "i32"),
    "i64": Dtype("int64", "long long", "long long", "i64"),
    "u8": Dtype("uint8", "unsigned char", "unsigned char", "u8"),
    "u16": Dtype("uint16", "unsigned short", "unsigned short", "u16"),
    "u32": Dtype("uint32", "unsigned int", "unsigned int", "u32"),
    "u64": Dtype("uint64", "unsigned long long", "unsigned long long", "u64"),
}
# How parameters are passed to C: by the codes of `DTYPES`, and "*" for pointers.
CTYPES: dict[str, Any] = {
    "*": ctypes.c_void_p, "bool": ctypes.c_bool, "f32": ctypes.c_float, "f64": ctypes.c_double,
    "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
}  # fmt: skip
