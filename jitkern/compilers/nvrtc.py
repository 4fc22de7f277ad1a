"""NVRTC, for `__global__` functions: an exact-arch cubin, with no nvcc, no CUDA_HOME and no GPU.

A file with a host half (`main`, stdio, `cudaMalloc`) is compiled without it. One whose kernels need
that half goes to `nvcc -cubin`.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jitkern import closure as closures
from jitkern import cuda_arch, cxx, units
from jitkern.closure import Closure
from jitkern.compilers import nvcc, ptx, templates, toolkit
from jitkern.compilers.host_half import DeviceHalf, device_half
from jitkern.compilers.host_headers import is_implied
from jitkern.compilers.nvrtc_program import Program, build_id, check_arch
from jitkern.compilers.result import (
    Built,
    compile_error,
    missing_function,
    missing_header,
    no_function,
    write_log,
)
from jitkern.errors import CompileError, TargetError
from jitkern.kernel import DTYPES, Constant, Source, Variant
from jitkern.target import Target

_UNKNOWN_OPTION = re.compile(r"unrecognized option (.+) found|requires (--extended-lambda) nvcc")
# Flags of nvcc for host code, or for what NVRTC does anyway; some take the next one as their value.
_NVCC_ONLY = re.compile(
    r"-O[0-3]|--optimize=.*|--?(?:expt-relaxed-constexpr|(?:expt-)?extended-lambda)"
    r"|(?:-Xcompiler|--compiler-options)=.*"
)
_NVCC_ONLY_PAIRS = {"-O", "--optimize", "-Xcompiler", "--compiler-options"}
_HEADERS = (("__half", "fp16"), ("__nv_bfloat16", "bf16"), ("__nv_fp8", "fp8"))
_UNDEFINED = re.compile(r'identifier "(\w+)" is undefined')
_OTHER_INT64 = re.compile(r'redeclaration of type name "u?int(?:64|ptr)_t"')
_ERROR_LINE = re.compile(r"(?m)^(.+?)\((\d+)\): (?:catastrophic )?error:")
_NO_FILES = {"__nv_name_map", "jitkern probe"}
_UNRESOLVED = re.compile(r"Unresolved extern function '(\w+)'")
_EXTERN = re.compile(r"extern declaration of the entity (\w+) is treated as a static definition")


class Nvrtc:
    """One instantiation of one kernel per cubin."""

    def target(self, source: Source, target: Target) -> Target:
        return target.for_device_code()

    def flags(self, source: Source, target: Target) -> tuple[str, ...]:
        return ("-std=c++17", *source.flags)

    def identities(self, source: Source, target: Target) -> list[dict[str, str]]:
        _, library = toolkit.nvrtc_for(target)
        found = [{"name": "nvrtc", "version": build_id(library)}]
        other = toolkit.nvcc()
        return [*found, nvcc.identity(other[1])] if other else found

    def compile(self, variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
        if target.device != "cuda":
            raise TargetError(f"{variant.op}: a `.cu` kernel cannot be built for {target}")
        _, library = toolkit.nvrtc_for(target)
        check_arch(library, target)
        _refuse_arch(variant, target)
        text = cxx.read(variant.source.paths[0])
        kernel = _named(variant, text, closure)
        attempt = _Attempt(variant, target, closure, staging, library, kernel)
        built, output = attempt.build(DeviceHalf(text, {}))
        half = None
        if not built:
            half = device_half(variant.source, closure)
            half = half if _needs(output, variant.source.paths[0], text, half) else None
            built, output = attempt.build_half(half) if half else (None, output)
        if built:
            return built
        other = nvcc.nvcc_for(target)
        if not other or not (half or missing_header(output) or _UNKNOWN_OPTION.search(output)):
            hint = _hint(variant, target, text, output, half=half is not None)
            raise compile_error(variant, target, attempt.command, output, hint)
        try:
            return nvcc.compile_unit(
                variant, target, closure, staging, nvcc=other,
                flags=self.flags(variant.source, target), text=text,
                used=(kernel.address, f"&{kernel.probe}"),
                hint=lambda said: _said(variant, target, text, said),
            )  # fmt: skip
        except CompileError as e:
            header = missing_header(e.log)
            if not header or missing_header(output):
                raise
            hint = _said(variant, target, text, output) or (
                "Of this file the device half was compiled. If a kernel needs the other half, "
                f"nvcc compiles it where it finds <{header}>: declare its directory with "
                "include=[...]"
            )
            raise compile_error(variant, target, attempt.command, output, hint) from e


class _Kernel(NamedTuple):
    """Expressions for a kernel, for its address and for its probe."""

    name: str
    address: str
    probe: str


class _Attempt:
    """Building one variant with NVRTC; tried once with the file as it is, then without its host."""

    def __init__(
        self, variant: Variant, target: Target, closure: Closure, staging: Path,
        library: ctypes.CDLL, kernel: _Kernel,
    ) -> None:  # fmt: skip
        source = variant.source
        self._variant, self._closure, self._staging = variant, closure, staging
        self._library, self._kernel = library, kernel
        self._options = [f"-arch={target.arch}", "--no-cache"]
        self._options += _without_nvcc_flags(Nvrtc().flags(source, target))
        self._options += [f"-I{root.path}" for root in source.roots]
        self._options += [f"-I{directory}" for directory in toolkit.include_directories()]
        self._numbers = itertools.count()
        self.command = ["nvrtc", *self._options, kernel.name]

    def build_half(self, half: DeviceHalf) -> tuple[Built | None, str]:
        """`build`, where what NVRTC refuses and is not the device's is left out, too."""
        built, output = self.build(half)
        if _OTHER_INT64.search(output):
            half = half._replace(int64="long long")
            built, output = self.build(half)
        while not built:
            less = half.without(_error_lines(output)[str(self._variant.source.paths[0])])
            if less == half:
                break
            built, said = self.build(less)
            if half.lost(less).intersection(_UNDEFINED.findall(said)):
                break  # a kernel needs it
            half, output = less, said
        return built, output

    def build(self, unit: DeviceHalf) -> tuple[Built | None, str]:
        """What it compiles to, or None; and what NVRTC said. Raises CompileError."""
        variant, kernel = self._variant, self._kernel
        name = f"/jitkern/{variant.source.files[0]}"
        trace = self._staging / f"trace{next(self._numbers)}"  # NVRTC fails on one that is there
        text, expressions = f"{unit.text}\n{ptx.PROBE}", (kernel.name, kernel.probe)
        program = Program(self._library, text, name, expressions, unit.headers)
        try:
            options = [*self._options, *unit.options, f"-fdevice-time-trace={trace}"]
            failed, output = program.compile(options)
            output = output.replace(name, str(variant.source.paths[0]))
            note = "(without the host half of the file)\n" if unit.headers else ""
            write_log(self._staging, self.command, note + output)
            if failed:
                return None, output
            symbol, parameters = ptx.signature(program.text("PTX"), program.lowered(kernel.name))
            (self._staging / "kernel.cubin").write_bytes(program.bytes("CUBIN"))
        finally:
            program.destroy()
        _refuse_split_variables(variant, output)
        opened = _opened(trace.with_suffix(".json"))
        known = toolkit.include_directories()
        closures.check(variant.source, self._closure, opened, known, variant.op)
        meta = {"artifact": "kernel.cubin", "symbol": symbol, "parameters": parameters}
        return Built({"name": "nvrtc", "version": build_id(self._library)}, meta), output


def _opened(trace: Path) -> list[str]:
    """The headers on disk that NVRTC opened; its built-in ones have no path."""
    events = json.loads(trace.read_text())["traceEvents"]
    opened = [e["args"]["detail"] for e in events if e.get("name") == "Processing Header File"]
    trace.unlink()
    return [name for name in opened if Path(name).is_absolute()]


def _needs(output: str, path: Path, text: str, half: DeviceHalf) -> bool:
    """Whether what NVRTC refused may be the host half: a header, or lines that go with it."""
    marked = "error: unrecognized token" in output  # a byte order mark of a header
    if marked or missing_header(output) or any(map(is_implied, _UNDEFINED.findall(output))):
        return True
    rows = zip(text.splitlines(), half.text.splitlines())
    host = {number for number, (row, kept) in enumerate(rows, 1) if row != kept}
    places = _error_lines(output)
    errors = places.pop(str(path), set())
    if places.keys() - _NO_FILES:  # a header
        return True
    return not host.isdisjoint(errors) or half.without(errors) != half


def _error_lines(output: str) -> defaultdict[str, set[int]]:
    """The lines of each file that errors are at."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for file, line in _ERROR_LINE.findall(output):
        found[file].add(int(line))
    return found


def _without_nvcc_flags(flags: Sequence[str]) -> list[str]:
    """The flags that are left for NVRTC."""
    before = ("", *flags)
    return [
        flag for flag, previous in zip(flags, before)
        if not _NVCC_ONLY.fullmatch(flag) and not {flag, previous} & _NVCC_ONLY_PAIRS
    ]  # fmt: skip


def _refuse_arch(variant: Variant, target: Target) -> None:
    if cuda_arch.is_named(variant.source.flags):
        raise CompileError(
            f"{variant.op} for {target}: its flags name an arch, which the target decides: leave "
            "it out of the flags, and compile for the target that is meant",
            op=variant.op,
        )


def _named(variant: Variant, text: str, closure: Closure) -> _Kernel:
    """How C++ names the kernel; `k(float*, int)` is one overload. Raises CompileError."""
    name, bracket, signature = variant.function.partition("(")
    name += _template_arguments(variant, text, closure)
    if not bracket:
        return _Kernel(name, f"&{name}", ptx.probe(name))
    overload = f"void (*)({signature}"
    return _Kernel(
        f"({overload}){name}", f"({overload})&{name}", f"jitkern_probe<{overload}, &{name}>"
    )


def _template_arguments(variant: Variant, text: str, closure: Closure) -> str:
    """`<float, 4>`: the arguments in the order of the template's parameters.

    Raises CompileError.
    """
    given = dict(variant.template)
    if not given:
        return ""
    what = f"{variant.op}: `{variant.function}` in {variant.source.paths[0]}"
    lists = templates.declared(variant, text, closure)
    if lists is None:
        raise CompileError(
            f"{what}: the order of its template parameters is in no file of the kernel's, so give "
            "the arguments by number: 0, 1, ...",
            op=variant.op,
        )
    longest = max(lists, key=len)
    unknown = [name for name in given if not any(name in names for names in lists)]
    if unknown:
        raise CompileError(
            f"{what} has no template parameter `{unknown[0]}`; it has: "
            f"{', '.join(longest) or 'none'}",
            op=variant.op,
        )
    order = templates.ordered(variant, lists)
    return f"<{', '.join(_argument(variant.op, name, given[name]) for name in order)}>"


def _argument(op: str, name: str, value: Constant) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return DTYPES[value].cuda
    raise CompileError(
        f"{op}: template argument {name}={value}: a C++17 template takes no float", op=op
    )


def _hint(variant: Variant, target: Target, text: str, output: str, *, half: bool) -> str:
    """What to do about NVRTC's refusal where there is no nvcc."""
    if unknown := _UNKNOWN_OPTION.search(output):
        flag = unknown.group(1) or unknown.group(2)
        return f"NVRTC does not know `{flag}`; for a flag of nvcc, {nvcc.why_not(target)}"
    said = _said(variant, target, text, output)
    if missing_header(output) and not _wheel(output, target):
        return f"{said}, or as NVRTC has no host headers, {nvcc.why_not(target)}"
    if half and not said:
        return (
            "Of this file the device half was compiled: functions without `__global__` or "
            "`__device__`, and host headers, were left out. If a kernel needs them, "
            + nvcc.why_not(target)
        )
    return said


def _said(variant: Variant, target: Target, text: str, output: str) -> str:
    """What to do about what NVRTC or nvcc refused, as far as that does not depend on nvcc."""
    if missing := missing_header(output):
        return _wheel(output, target) or (
            f"<{missing}> is in no include root: declare its directory with include=[...]"
        )
    if unresolved := _UNRESOLVED.search(output):
        return units.elsewhere(variant.source, ptx.demangled(unresolved.group(1)))
    if said := _absent(variant, text, output):
        return said
    if "cannot determine which instance of" in output:
        return cxx.overloads(cxx.kernels_in(text), variant.function)
    for start, header in _HEADERS:
        name = next((n for n in _UNDEFINED.findall(output) if n.startswith(start)), "")
        if name:
            return f"`{name}` comes from a header: #include <cuda_{header}.h>"
    return ""


def _absent(variant: Variant, text: str, output: str) -> str:
    """That there is no such kernel, and which there are; else ""."""
    name = cxx.plain_name(variant.function).rpartition("::")[2]
    undefined = re.search(rf'(?:identifier|no member) "{re.escape(name)}"', output)
    kernels = dict.fromkeys(f.spelled for f in cxx.kernels_in(text))
    if undefined and not cxx.named(cxx.kernels_in(text), variant.function):
        return no_function(variant, list(kernels))
    return missing_function(variant._replace(function=name), list(kernels))


def _refuse_split_variables(variant: Variant, output: str) -> None:
    """NVRTC takes an `extern __device__` variable for one of this unit, with a value of its own."""
    for name in _EXTERN.findall(output):
        if place := units.defining(variant.source, name):
            raise CompileError(
                f"{variant.op}: `{variant.function}` uses `{name}`, which {place} defines: each "
                "unit is compiled by itself, so pass it as an argument, or use one file",
                op=variant.op,
            )


def _wheel(output: str, target: Target) -> str:
    """Which wheel has the header that is missing; else ""."""
    header = missing_header(output)
    if header.startswith("curand"):  # its versions are not CUDA's
        major = target.cuda_version[0]
        wheel = "nvidia-curand" if major >= 13 else f"nvidia-curand-cu{major}"
        return f"<{header}> comes with cuRAND: pip install {wheel}"
    for pattern, wheel in toolkit.HEADER_WHEELS:
        if re.match(pattern, header):
            remedy = toolkit.pip_line(wheel, target.cuda_version)
            return f"<{header}> comes with the CUDA headers: {remedy}"
    return ""
