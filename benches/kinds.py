"""The kinds of kernel that `first_call` compares: name, devices, and for jitkern's own what proves the kind.

Light, because the timed process imports it too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One way to a kernel. `prefer` and `compiler` are the value of JITKERN_PREFER and the name in the manifest."""

    name: str
    devices: tuple[str, ...]
    needs: str = ""  # a package that must be installed
    op: str = ""  # jitkern's op, where it is one of ours
    prefer: str = ""
    compiler: str = ""
    cold_rounds: int = 3


KINDS = {
    kind.name: kind
    for kind in (
        Kind("jitkern.cuda", ("cuda",), op="vec_add", prefer="nvrtc", compiler="nvrtc"),
        Kind("jitkern.triton", ("cuda",), "triton", op="vec_add", prefer="triton", compiler="triton"),
        Kind("jitkern.cpp", ("cpu",), op="vec_add", prefer="cc", compiler="cc"),
        Kind("jitkern.extension", ("cpu", "cuda"), op="muladd", prefer="extension", compiler="load_inline"),
        Kind("load_inline", ("cpu", "cuda"), cold_rounds=1),
        Kind("triton", ("cuda",), "triton"),
        Kind("cupy", ("cuda",), "cupy"),
        Kind("compile_kernel", ("cuda",)),
    )
}
RAW = ("jitkern.cuda", "jitkern.triton", "jitkern.cpp")  # ours that need no Torch header
