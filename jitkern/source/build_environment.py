"""Environment variables that compilers and linkers read, beside their arguments."""

from __future__ import annotations

from jitkern import config

NVCC_FLAGS = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
ENVIRONMENT = (  # passed on to compilers; their values are a part of the key
    *config.SEARCHED, *NVCC_FLAGS, "LIBRARY_PATH", "CUDA_INC_PATH", "CUDNN_HOME", "CUDNN_PATH",
)  # fmt: skip
