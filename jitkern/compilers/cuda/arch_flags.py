"""The GPUs to compile CUDA sources for, chosen as `torch.utils.cpp_extension` chooses them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jitkern.errors import TargetError
from jitkern.target import Target

_NAMED = {  # the longer names first: they contain the others
    "Kepler+Tesla": "3.7",
    "Kepler": "3.5+PTX",
    "Maxwell+Tegra": "5.3",
    "Maxwell": "5.0;5.2+PTX",
    "Pascal": "6.0;6.1+PTX",
    "Volta+Tegra": "7.2",
    "Volta": "7.0+PTX",
    "Turing": "7.5+PTX",
    "Ampere+Tegra": "8.7",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell+Tegra": "11.0",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}
_OPTIONS = r"-arch\b|-code\b|-gencode\b|--(?:gpu-architecture|gpu-code|generate-code)\b"
_WITHOUT = (
    "name the GPUs to compile for in TORCH_CUDA_ARCH_LIST, e.g. TORCH_CUDA_ARCH_LIST=9.0, or in "
    'extra_cuda_cflags, e.g. "-arch=sm_90"'
)


def arch_flags(listed: str | None, cuda_cflags: Sequence[str]) -> tuple[str, ...]:
    """nvcc's flags for the archs of `listed` (TORCH_CUDA_ARCH_LIST), or of the visible GPUs.

    No flags if `cuda_cflags` name an arch. Raises TargetError for a name that is not an arch (also
    an empty one after the last `;`), and if there is neither a list nor a GPU.
    """
    if is_named(cuda_cflags):
        return ()
    if listed and listed != "native":
        archs = listed.replace(" ", ";")
        for name, numbers in _NAMED.items():
            archs = archs.replace(name, numbers)
        selected = archs.split(";")
    else:
        selected = _visible()
    return tuple(sorted({flag for arch in selected for flag in _flags(arch)}))


def is_named(flags: Sequence[str]) -> bool:
    """Whether nvcc's flags name an arch."""
    return any(re.match(_OPTIONS, flag) for flag in flags)


def named_arch(flags: Sequence[str]) -> str:
    """The last arch that nvcc's flags name, as `sm_90`; "" if they name none by its number."""
    archs = re.findall(r"\b(?:sm|compute)_([1-9]\d{1,2}[af]?)\b", " ".join(flags))
    return f"sm_{archs[-1]}" if archs else ""


def _flags(arch: str) -> tuple[str, ...]:
    match = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", arch)
    if not match:
        empty = "" if arch else ": the list has a `;` or a space too many"
        raise TargetError(f"Unknown CUDA arch ({arch}) or GPU not supported{empty}; {_WITHOUT}")
    number = match.group(1) + match.group(2)
    binary = f"-gencode=arch=compute_{number},code=sm_{number}"
    text = f"-gencode=arch=compute_{number},code=compute_{number}"
    return (binary, text) if match.group(3) else (binary,)


def _visible() -> list[str]:
    """The archs of the visible GPUs, as far as this Torch supports them, and PTX of the newest."""
    import torch

    if torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        capabilities = {torch.cuda.get_device_capability(number) for number in devices}
    else:
        names = [target.arch for target in Target.visible() if target.device == "cuda"]
        capabilities = {(int(name[3:-1]), int(name[-1])) for name in names}
    if not capabilities:
        raise TargetError(f"there is no visible GPU to compile CUDA sources for: {_WITHOUT}")
    built = re.findall(r"sm_(\d+)(\d)", torch._C._cuda_getArchFlags() or "")
    newest = max(((int(major), int(minor)) for major, minor in built), default=max(capabilities))
    archs = sorted({min(newest, capability) for capability in capabilities})
    return [
        f"{major}.{minor}" + ("+PTX" if (major, minor) == archs[-1] else "")
        for major, minor in archs
    ]
