"""Environment variables and flags that make compilers and linkers read further files."""

from __future__ import annotations

from jitkern import config

NVCC_FLAGS = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
ENVIRONMENT = (  # passed on to compilers; their values are a part of the key
    *config.SEARCHED, *NVCC_FLAGS, "LIBRARY_PATH", "CUDA_INC_PATH", "CUDNN_HOME", "CUDNN_PATH",
)  # fmt: skip
_PLAIN_FLAGS = ("-O", "-W", "-D", "-U", "-f", "-m", "-std=", "-g", "-arch=sm_")


def names_no_file(flag: str) -> bool:
    """Return whether a flag names no file; the value of a macro may name one in quotes."""
    quotes = '"<' if "/" in flag else ""
    odd = quotes if flag.startswith("-D") else ",/"
    return flag.startswith(_PLAIN_FLAGS) and not set(flag) & set(f" \t\n@{odd}")
