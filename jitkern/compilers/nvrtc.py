"""NVRTC, for plain `__global__` files: an exact-arch cubin, with no nvcc, no CUDA_HOME and no GPU.

A file that needs host headers (`<cstdio>`, say) goes to `nvcc -cubin`, which drops the host half.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
from pathlib import Path

from jitkern import closure as closures
from jitkern.closure import Closure
from jitkern.compilers import ptx, toolkit
from jitkern.compilers.result import (
    Built,
    compile_error,
    missing_function,
    read_dependencies,
    run,
    write_log,
)
from jitkern.errors import CompileError, TargetError
from jitkern.kernel import DTYPES, Constant, Source, Variant
from jitkern.target import Target

_MISSING_HEADER = re.compile(r'(?:cannot open source file|could not open source file) "([^"]+)"')
_KERNEL = re.compile(r"__global__[^;{]*?\b(\w+)\s*\(", re.DOTALL)


class Nvrtc:
    """One instantiation of one kernel per cubin."""

    def target(self, source: Source, target: Target) -> Target:
        return target.for_device_code()

    def flags(self, source: Source, target: Target) -> tuple[str, ...]:
        return ("-std=c++17", *source.flags)

    def identities(self, source: Source, target: Target) -> list[dict[str, str]]:
        _, library = toolkit.nvrtc_for(target)
        found = [{"name": "nvrtc", "version": _build_id(library)}]
        nvcc = toolkit.nvcc()
        return [*found, _nvcc_identity(nvcc[1])] if nvcc else found

    def compile(self, variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
        if target.device != "cuda":
            raise TargetError(f"{variant.op}: a `.cu` kernel cannot be built for {target}")
        _, library = toolkit.nvrtc_for(target)
        _check_arch(library, target)
        text = variant.source.paths[0].read_text()
        expression = variant.function + _template_arguments(variant, text)
        unit = text + "\n" + ptx.PROBE
        options = [f"-arch={target.arch}", "--no-cache", *self.flags(variant.source, target)]
        options += [f"-I{root.path}" for root in variant.source.roots]
        options += [f"-I{directory}" for directory in toolkit.include_directories()]
        program = _Program(library, unit, _name_of(variant), (expression, ptx.probe(expression)))
        try:
            failed, output = program.compile([*options, f"-fdevice-time-trace={staging / 'trace'}"])
            output = output.replace(_name_of(variant), str(variant.source.paths[0]))
            write_log(staging, ["nvrtc", *options, expression], output)
            missing = _MISSING_HEADER.search(output) if failed else None
            if missing and toolkit.nvcc():
                return self._compile_with_nvcc(variant, target, closure, staging, unit, expression)
            if failed:
                hint = (
                    _missing_header(missing.group(1), target)
                    if missing
                    else missing_function(variant, _KERNEL.findall(text))
                )
                raise compile_error(variant, target, ["nvrtc", *options, expression], output, hint)
            symbol, parameters = ptx.signature(program.text("PTX"), program.lowered(expression))
            (staging / "kernel.cubin").write_bytes(program.bytes("CUBIN"))
        finally:
            program.destroy()
        trace = staging / "trace.json"
        closures.check(
            variant.source, closure, _opened(trace), toolkit.include_directories(), variant.op
        )
        trace.unlink()
        meta = {"artifact": "kernel.cubin", "symbol": symbol, "parameters": parameters}
        return Built({"name": "nvrtc", "version": _build_id(library)}, meta)

    def _compile_with_nvcc(
        self,
        variant: Variant,
        target: Target,
        closure: Closure,
        staging: Path,
        unit: str,
        expression: str,
    ) -> Built:
        found = toolkit.nvcc()
        assert found
        tool, version = found
        if version[0] != target.cuda_version[0] or version > target.cuda_version:
            raise TargetError(
                f"{variant.op} needs nvcc, and nvcc {version[0]}.{version[1]} "
                f"cannot build for {target}"
            )
        build = staging / "build"
        build.mkdir()
        source = variant.source
        reference = (
            f"\nstatic void* jitkern_used[] = "
            f"{{(void*)&{expression}, (void*)&{ptx.probe(expression)}}};\n"
        )
        (build / "kernel.cu").write_text(f'#line 1 "{source.paths[0]}"\n{unit}{reference}')
        command = [
            tool, "-cubin", f"-arch={target.arch}", *self.flags(source, target),
            *(f"-I{root.path}" for root in source.roots),
            "-MD", "-MF", "deps.d", "--keep", "--keep-dir", ".", "-o", "out.cubin", "kernel.cu",
        ]  # fmt: skip
        done = run(command, source=source, folder=build)
        write_log(staging, command, done.stdout)
        if done.returncode:
            raise compile_error(
                variant,
                target,
                command,
                done.stdout,
                missing_function(variant, _KERNEL.findall(unit)),
            )
        known: list[str | Path] = [
            *toolkit.include_directories(),
            *toolkit.cuda_homes(),
            "/usr",
            build,
        ]
        opened = [build / name for name in read_dependencies(build / "deps.d")]
        closures.check(source, closure, opened, known, variant.op)
        symbol, parameters = ptx.signature((build / "kernel.ptx").read_text())
        (staging / "kernel.cubin").write_bytes((build / "out.cubin").read_bytes())
        meta = {"artifact": "kernel.cubin", "symbol": symbol, "parameters": parameters}
        return Built(_nvcc_identity(version), meta)


class _Program:
    """One nvrtcProgram."""

    def __init__(
        self, library: ctypes.CDLL, text: str, name: str, expressions: tuple[str, ...]
    ) -> None:
        self._library = library
        self._handle = ctypes.c_void_p()
        # A constant absolute name in a directory that does not exist: NVRTC searches quoted
        # includes in the name's directory, and bytes of the cubin depend on the name.
        self._ok(
            library.nvrtcCreateProgram(
                ctypes.byref(self._handle), text.encode(), name.encode(), 0, None, None
            )
        )
        for expression in expressions:
            self._ok(library.nvrtcAddNameExpression(self._handle, expression.encode()))

    def compile(self, options: list[str]) -> tuple[bool, str]:
        """(failed, log)."""
        array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        failed = bool(self._library.nvrtcCompileProgram(self._handle, len(options), array))
        return failed, self.text("ProgramLog")

    def bytes(self, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._ok(getattr(self._library, f"nvrtcGet{what}Size")(self._handle, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._ok(getattr(self._library, f"nvrtcGet{what}")(self._handle, buffer))
        return buffer.raw

    def text(self, what: str) -> str:
        return self.bytes(what).rstrip(b"\0").decode(errors="replace")

    def lowered(self, expression: str) -> str:
        name = ctypes.c_char_p()
        self._ok(
            self._library.nvrtcGetLoweredName(self._handle, expression.encode(), ctypes.byref(name))
        )
        assert name.value
        return name.value.decode()

    def destroy(self) -> None:
        self._library.nvrtcDestroyProgram(ctypes.byref(self._handle))

    def _ok(self, result: int) -> None:
        if result:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise CompileError(
                f"NVRTC failed: {self._library.nvrtcGetErrorString(result).decode()}"
            )


def _nvcc_identity(version: tuple[int, int]) -> dict[str, str]:
    return {"name": "nvcc", "version": f"{version[0]}.{version[1]}"}


def _name_of(variant: Variant) -> str:
    return f"/jitkern/{variant.source.files[0]}"


def _check_arch(library: ctypes.CDLL, target: Target) -> None:
    count = ctypes.c_int()
    library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    archs = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(archs)
    if int(re.sub(r"\D", "", target.arch)) not in list(archs):
        raise TargetError(
            f"NVRTC cannot build for {target}: it supports "
            f"{', '.join(f'sm_{arch}' for arch in archs)}"
        )


@functools.cache
def _build_id(library: ctypes.CDLL) -> str:
    """The full version, which nvrtcVersion lacks: `V13.0.88`, from the PTX of an empty program."""
    program = _Program(library, "", "/jitkern/empty.cu", ())
    try:
        program.compile(["--no-cache"])
        found = re.search(r"\bV[\d.]+", program.text("PTX"))
        return found.group(0) if found else "unknown"
    finally:
        program.destroy()


def _template_arguments(variant: Variant, text: str) -> str:
    """`<float, 4>`: the arguments in the order of the source's template parameters."""
    given = dict(variant.template)
    if not given:
        return ""
    declared = _template_parameters(variant.function, text)
    unknown = [name for name in given if declared is not None and name not in declared]
    if unknown:
        raise CompileError(
            f"{variant.op}: `{variant.function}` in {variant.source.paths[0]} has "
            f"no template parameter `{unknown[0]}`; it has: {', '.join(declared or []) or 'none'}",
            op=variant.op,
        )
    order = [name for name in declared if name in given] if declared else list(given)
    return f"<{', '.join(_argument(variant.op, name, given[name]) for name in order)}>"


def _template_parameters(function: str, text: str) -> list[str] | None:
    """Names of the template parameters, read from the text; None where it cannot be told."""
    found = re.search(
        rf"(template\s*<([^;{{}}()]*)>\s*)?(?:static\s+|inline\s+)*"
        rf"__global__[^;{{}}]*?\b{re.escape(function)}\s*\(",
        text,
    )
    if not found:
        return None
    if not found.group(1):
        return []
    return [
        re.split(r"[\s.]+", part.partition("=")[0].strip())[-1]
        for part in found.group(2).split(",")
    ]


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


def _missing_header(header: str, target: Target) -> str:
    for pattern, wheel in toolkit.HEADER_WHEELS:
        if re.match(pattern, header):
            remedy = toolkit.pip_line(wheel, target.cuda_version)
            return f"<{header}> comes with the CUDA headers: {remedy}"
    return f"<{header}> is a host header, which NVRTC does not have: remove it, or install nvcc"


def _opened(trace: Path) -> list[str]:
    """The headers on disk that NVRTC opened; its built-in ones have no path."""
    events = json.loads(trace.read_text())["traceEvents"]
    opened = [e["args"]["detail"] for e in events if e.get("name") == "Processing Header File"]
    return [name for name in opened if Path(name).is_absolute()]
