"""Compile with NVRTC: the file as it is, then with stand-ins for host headers, then with nvcc."""

from __future__ import annotations

import ctypes
import itertools
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from jitkern.compilers import cuda, dependencies
from jitkern.compilers.cpp import functions
from jitkern.compilers.cuda import arch_flags, nvrtc_api, ptx, stand_ins, toolkit
from jitkern.compilers.result import Built, compile_error, missing_function, no_kernel, write_log
from jitkern.errors import CompileError, TargetError
from jitkern.named_tuple import NamedTuple
from jitkern.source import cpp_text, defining_file
from jitkern.source.closure import Closure
from jitkern.source.dtypes import Constant
from jitkern.source.flags import words_of
from jitkern.source.kinds import Variant
from jitkern.target import Target

# Flags of nvcc for host code, or for NVRTC's defaults; some take the next flag as their value.
_LEFT_OUT = (
    r"-O[0-3]|--optimize=.*|--?(?:expt-relaxed-constexpr|(?:expt-)?extended-lambda)"
    r"|(?:-Xcompiler|--compiler-options)=.*"
)
_LEFT_OUT_PAIRS = {"-O", "--optimize", "-Xcompiler", "--compiler-options"}
_OTHER_INT64 = r'redeclaration of type name "u?int(?:64|ptr)_t"'
_EXTERN = r"extern declaration of the entity (\w+) is treated as a static definition"


def identities(target: Target) -> list[dict[str, str]]:
    """Name and version of the NVRTC that builds for `target`, and of nvcc if it is installed."""
    library = toolkit.nvrtc_for(target)
    identity = [{"name": "nvrtc", "version": nvrtc_api.build_id(library)}]
    nvcc = toolkit.nvcc()
    return [*identity, cuda.nvcc.identity(nvcc[1])] if nvcc else identity


def build(
    variant: Variant, target: Target, closure: Closure, staging: Path, flags: tuple[str, ...]
) -> Built:
    """Do what `Compiler.compile` promises."""
    if target.device != "cuda":
        raise TargetError(f"{variant.op}: a `.cu` kernel cannot be built for {target}")
    library = toolkit.nvrtc_for(target)
    nvrtc_api.check_arch(library, target)
    _refuse_arch(variant, target)
    text = cpp_text.read(variant.source.paths[0])
    kernel = _kernel_of(variant, text, closure)
    attempt = _Attempt(variant, target, closure, staging, library, kernel, flags, text)
    built, output = attempt.build()
    if not built:
        headers = stand_ins.headers_for(closure)
        built, output = attempt.build(headers)
        if re.search(_OTHER_INT64, output):
            built, output = attempt.build(headers, int64="long long")
    if built:
        return built
    attempt.end_trace()
    used = kernel.address, f"&{kernel.probe}"
    if nvcc := cuda.nvcc.nvcc_for(target):
        return cuda.nvcc.compile_unit(
            variant, target, closure, staging, nvcc=nvcc, flags=flags, text=text, used=used
        )
    hint = cuda.nvrtc_hints.hint(variant, target, text, output)
    raise compile_error(variant, target, attempt.command, output, hint)


class _Kernel(NamedTuple):
    """Expressions in C++ for a kernel, for its address and for its probe."""

    name: str
    address: str
    probe: str


class _Attempt:
    """One variant to build with NVRTC, with or without stand-ins for headers."""

    def __init__(
        self, variant: Variant, target: Target, closure: Closure, staging: Path,
        library: ctypes.CDLL, kernel: _Kernel, flags: Sequence[str], text: str,
    ) -> None:  # fmt: skip
        source = variant.source
        self.variant, self.target, self.kernel = variant, target, kernel
        self.closure, self.staging = closure, staging
        self._library = library
        self._text = f"{text}\n{ptx.PROBE}"
        self._options = [f"-arch={target.arch}", ptx.VERBOSE, *_for_nvrtc(flags)]
        self._toolkit = toolkit.include_directories(target.cuda_version[0])
        directories = [*(Path(root.path) for root in source.roots), *self._toolkit]
        self._options += [f"-I{directory}" for directory in directories]
        self._headers = stand_ins.of_cub(directories)
        self._numbers = itertools.count()
        self.command = ["nvrtc", *self._options, kernel.name]

    def build(
        self, host: Mapping[str, str] | None = None, int64: str = "long"
    ) -> tuple[Built | None, str]:
        """The result, or None if NVRTC refused the file; and NVRTC's log. Raises CompileError.

        host: stand-ins for headers of the host. With them, code without a mark is the device's, as
        nvcc has it for `constexpr` functions.
        """
        variant, kernel = self.variant, self.kernel
        name = f"/jitkern/{variant.source.files[0]}"
        trace = self.staging / f"trace{next(self._numbers)}"  # NVRTC fails if the file exists
        expressions = (kernel.name, kernel.probe)
        headers = {**self._headers, **(host or {})}
        implied = f"-D{stand_ins.INT64}={int64}", f"--pre-include={stand_ins.IMPLIED}"
        added = ["-default-device", *implied] if host else []
        program = nvrtc_api.NvrtcProgram(self._library, self._text, name, expressions, headers)
        try:
            options = [*self._options, *added, f"-fdevice-time-trace={trace}"]
            failed, output = program.compile(options)
            output = output.replace(name, str(variant.source.paths[0]))
            write_log(self.staging, [*self.command, *added], output, unseen=True)
            if failed:
                return None, output
            assembly = program.text("PTX")
            if not assembly:
                raise CompileError(
                    f"{variant.op}: by its flags {[*variant.source.flags]} NVRTC writes code for a "
                    "linker, as `-dlto` asks for, and no kernel: remove that flag",
                    op=variant.op,
                )
            symbol, parameters = ptx.signature(assembly, program.lowered(kernel.name))
            if not symbol:
                raise CompileError(f"{variant.op}: {no_kernel(variant)}", op=variant.op)
            (self.staging / "kernel.cubin").write_bytes(program.bytes("CUBIN"))
        finally:
            program.destroy()
        _refuse_split_variables(variant, output)
        names = _included(trace.with_suffix(".json"))
        _refuse_unreadable(variant, names)
        files = _on_disk(names, headers)
        dependencies.check(variant.source, self.closure, files, self._toolkit, variant.op)
        meta = {
            "artifact": "kernel.cubin", "symbol": symbol, "parameters": parameters,
            "resources": ptx.resources(assembly, symbol, output),
        }  # fmt: skip
        return Built({"name": "nvrtc", "version": nvrtc_api.version_in(assembly)}, meta), output

    def end_trace(self) -> None:
        """Have NVRTC write the trace that a failure leaves open in this thread.

        Else the next compile writes it, whoever asks for that, to `.json` in the current directory.
        """
        trace = self.staging / "trace"
        nvrtc_api.compile_nothing(self._library, f"-fdevice-time-trace={trace}")
        trace.with_suffix(".json").unlink()


def _included(trace: Path) -> list[str]:
    """The names of the headers that NVRTC included."""
    events = json.loads(trace.read_text())["traceEvents"]
    trace.unlink()
    return [e["args"]["detail"] for e in events if e.get("name") == "Processing Header File"]


def _on_disk(names: Iterable[str], stand_ins: Collection[str]) -> list[Path]:
    """The headers that are files: neither built into NVRTC nor given to it as stand-ins.

    A relative name is a path from the current directory.
    """
    paths = [Path(name).absolute() for name in names if name not in stand_ins]
    return [path for path in paths if path.is_file()]


def _refuse_unreadable(variant: Variant, names: Sequence[str]) -> None:
    """Raise CompileError for a header whose path NVRTC cannot spell."""
    for name in names:
        if "\N{REPLACEMENT CHARACTER}" in name:
            raise CompileError(
                f"{variant.op}: NVRTC includes {name}, whose path is not UTF-8, so the file cannot "
                "be identified: rename the folder",
                op=variant.op,
            )


def _for_nvrtc(flags: Sequence[str]) -> list[str]:
    """The flags without those of nvcc alone."""
    before = ("", *flags)
    return [
        flag for flag, previous in zip(flags, before)
        if not re.fullmatch(_LEFT_OUT, flag) and not {flag, previous} & _LEFT_OUT_PAIRS
    ]  # fmt: skip


def _refuse_arch(variant: Variant, target: Target) -> None:
    if arch_flags.is_named(words_of(variant.source)):
        raise CompileError(
            f"{variant.op} for {target}: its flags name an arch; remove the arch flag: the target "
            "sets it",
            op=variant.op,
        )


def _kernel_of(variant: Variant, text: str, closure: Closure) -> _Kernel:
    """The C++ expressions for the kernel; `k(float*, int)` is one overload. Raises CompileError."""
    name, bracket, signature = variant.function.partition("(")
    name += _template_arguments(variant, text, closure)
    if not bracket:
        return _Kernel(name, f"&{name}", ptx.probe(name))
    overload = f"void (*)({signature}"
    return _Kernel(
        f"({overload}){name}", f"({overload})&{name}", f"jitkern_probe<{overload}, &{name}>"
    )


def _template_arguments(variant: Variant, text: str, closure: Closure) -> str:
    """The template arguments in the order of the template's parameters: `<float, 4>`.

    Raises CompileError.
    """
    arguments = dict(variant.template)
    if not arguments:
        return ""
    what = f"{variant.op}: `{variant.function}` in {variant.source.paths[0]}"
    lists = functions.parameter_lists(variant, text, closure)
    if lists is None:
        hint = missing_function(variant, cpp_text.kernels_in(text))
        unknown_order = (
            f"{what}: cannot find its template declaration; pass template arguments by "
            'position: {"0": …}'
        )
        raise CompileError(f"{variant.op}: {hint}" if hint else unknown_order, op=variant.op)
    longest = max(lists, key=len)
    unknown = [name for name in arguments if not any(name in names for names in lists)]
    if unknown:
        raise CompileError(
            f"{what} has no template parameter `{unknown[0]}`; it has: "
            f"{', '.join(longest) or 'none'}",
            op=variant.op,
        )
    order = functions.ordered(variant, lists)
    return f"<{', '.join(_argument(variant.op, name, arguments[name]) for name in order)}>"


def _argument(op: str, name: str, value: Constant) -> str:
    if isinstance(value, float):
        raise CompileError(
            f"{op}: template argument {name}={value}: a C++17 template takes no float", op=op
        )
    return functions.cpp_literal(value, "cuda")


def _refuse_split_variables(variant: Variant, output: str) -> None:
    """Raise CompileError for an `extern __device__` variable that another unit defines.

    NVRTC would make it a variable of this unit, with a value of its own.
    """
    for name in re.findall(_EXTERN, output):
        if file := defining_file.defining(variant.source, name):
            raise CompileError(
                f"{variant.op}: `{variant.function}` uses `{name}`, which {file} defines: each "
                "unit is compiled by itself, so pass it as an argument, or use one file",
                op=variant.op,
            )
