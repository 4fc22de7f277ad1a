"""Hints for the errors of NVRTC and nvcc. Imported when a compile has failed."""

from __future__ import annotations

import re

from jitkern.compilers.cuda import ptx, toolkit
from jitkern.compilers.cuda.nvrtc_api import UNDEFINED, UNKNOWN_OPTION
from jitkern.compilers.result import missing_function, missing_header, no_function, no_kernel
from jitkern.source import cpp_text, defining_file
from jitkern.source.kinds import Variant
from jitkern.target import Target

_HEADERS = (("__half", "fp16"), ("__nv_bfloat16", "bf16"), ("__nv_fp8", "fp8"))
_OF_ONE_ARCH = r"not supported on \.target|requires \.target"
_NO_KERNEL = r"cannot form address of a non-__global__"
_NO_NAMESPACE = 'name followed by "::"'
_UNRESOLVED = r"Unresolved extern function '(\w+)'"


def hint(variant: Variant, target: Target, text: str, output: str) -> str:
    """A hint for NVRTC's error if there is no nvcc."""
    install = toolkit.why_not_nvcc(target)
    if unknown := re.search(UNKNOWN_OPTION, output):
        flag = unknown.group(1) or "--extended-lambda"
        return f"NVRTC does not know `{flag}`; for a flag of nvcc, {install}"
    advice = remedy(variant, target, text, output)
    if advice and (not missing_header(output) or _wheel(output, target)):
        return advice
    guard = f"Guard what only the host needs with `#ifndef __CUDACC_RTC__`, or {install}"
    return f"{advice}. {guard}" if advice else guard


def remedy(variant: Variant, target: Target, text: str, output: str) -> str:
    """A hint for an error of NVRTC or nvcc, as far as the hint does not depend on nvcc; or ""."""
    if missing := missing_header(output):
        return _wheel(output, target) or (
            f"<{missing}> is in no include root: declare its directory with include=[...]"
        )
    if unresolved := re.search(_UNRESOLVED, output):
        return defining_file.elsewhere(variant.source, ptx.demangled(unresolved.group(1)))
    if hint := _of_one_arch(target, output) or _missing_kernel(variant, text, output):
        return hint
    if "cannot determine which instance of" in output:
        return cpp_text.overloads(cpp_text.kernels_in(text), variant.function)
    for start, header in _HEADERS:
        name = next((n for n in re.findall(UNDEFINED, output) if n.startswith(start)), "")
        if name:
            return f"`{name}` comes from a header: #include <cuda_{header}.h>"
    return ""


def _of_one_arch(target: Target, output: str) -> str:
    """A hint for an instruction that the arch of the build lacks, or ""."""
    if not re.search(_OF_ONE_ARCH, output):
        return ""
    if target.arch_specific() != target:
        return (
            f"For instructions that {target.arch}a has alone (wgmma, setmaxnreg, tcgen05) declare "
            "Cuda(..., arch_specific=True)"
        )
    return (
        f"{target.arch} lacks that instruction: keep the code below `#if __CUDA_ARCH__ >= 900`, or "
        "below `#ifdef __CUDA_ARCH_FEAT_SM90_ALL` for what sm_90a alone has"
    )


def _missing_kernel(variant: Variant, text: str, output: str) -> str:
    """An error hint listing the kernels that exist, or ""."""
    name = cpp_text.last_name(variant.function)
    undefined = re.search(rf'(?:identifier|no member) "{re.escape(name)}"', output)
    kernels = cpp_text.kernels_in(text)
    if undefined and not cpp_text.named(kernels, variant.function):
        return no_function(variant, kernels)
    if re.search(_NO_KERNEL, output):
        return no_kernel(variant)
    return missing_function(variant, kernels) if _NO_NAMESPACE in output else ""


def _wheel(output: str, target: Target) -> str:
    """A hint that names the wheel with the missing header, or ""."""
    header = missing_header(output)
    for pattern, part in toolkit.HEADER_PARTS:
        if re.match(pattern, header):
            line = toolkit.pip_line(part, target.cuda_version)
            return f"<{header}> comes with the CUDA headers: {line}"
    return ""
