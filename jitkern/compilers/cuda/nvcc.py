"""`nvcc -cubin`, for a `.cu` file whose kernels need what NVRTC lacks, such as host headers."""

from __future__ import annotations

from pathlib import Path

from jitkern.compilers import cuda, dependencies
from jitkern.compilers.cpp import cc_build
from jitkern.compilers.cuda import ptx, toolkit
from jitkern.compilers.result import Built, compile_error, no_kernel, run, write_log
from jitkern.errors import CompileError
from jitkern.source import cpp_text
from jitkern.source.closure import Closure
from jitkern.source.kinds import Variant
from jitkern.target import Target


def nvcc_for(target: Target) -> tuple[str, tuple[int, int]] | None:
    """(path, version) of an nvcc that builds for `target`: one of its major version."""
    tool = toolkit.nvcc()
    return tool if tool and tool[1][0] == target.cuda_version[0] else None


def identity(version: tuple[int, int]) -> dict[str, str]:
    """The name and version of nvcc, as manifests record them."""
    return {"name": "nvcc", "version": f"{version[0]}.{version[1]}"}


def compile_unit(
    variant: Variant,
    target: Target,
    closure: Closure,
    staging: Path,
    *,
    nvcc: tuple[str, tuple[int, int]],
    flags: tuple[str, ...],
    text: str,
    used: tuple[str, str],
) -> Built:
    """Compile a file with its host code, and keep only the cubin. Raises CompileError.

    text: the file; used: expressions for the addresses of the kernel and of its probe.
    """
    tool, version = nvcc
    source = variant.source
    wheels = toolkit.of_major(toolkit.wheel_prefixes(), version[0])
    build = staging / "build"
    build.mkdir()
    unit = f"{cpp_text.line_directive(source.paths[0])}{text}\n{_using(used)}"
    cpp_text.write(build / "kernel.cu", unit)
    command = [
        tool, "-cubin", f"-arch={target.arch}", ptx.VERBOSE, *flags,
        *(f"-I{root}" for root in source.searched),
        *(f"-isystem={prefix / 'include'}" for prefix in wheels),
        *dependencies.listing("unit", gcc=False), "--keep", "--keep-dir", ".",
        "-o", "out.cubin", "kernel.cu",
    ]  # fmt: skip
    process = run(command, source=source, folder=build, shown=True)
    write_log(staging, command, process.stdout)
    if process.returncode:
        hint = cuda.nvrtc_hints.remedy(variant, target, text, process.stdout)
        raise compile_error(variant, target, command, process.stdout, hint)
    files = dependencies.in_folder(build, ["unit"])
    host = cc_build.toolchain("c++", files)
    known = [*toolkit.include_directories(), *toolkit.cuda_homes(), *host]
    dependencies.check(source, closure, files, known, variant.op)
    assembly = (build / "kernel.ptx").read_text()
    symbol, parameters = ptx.signature(assembly)
    if not symbol:
        raise CompileError(f"{variant.op}: {no_kernel(variant)}", op=variant.op)
    (build / "out.cubin").replace(staging / "kernel.cubin")
    meta = {
        "artifact": "kernel.cubin", "symbol": symbol, "parameters": parameters,
        "resources": ptx.resources(assembly, symbol, process.stdout),
    }  # fmt: skip
    return Built(identity(version), meta)


def _using(used: tuple[str, str]) -> str:
    """Code that makes nvcc keep the kernel and its probe in the cubin."""
    addresses = ", ".join(f"(void*){expression}" for expression in used)
    return f"{ptx.PROBE}\nstatic void* jitkern_used[] = {{{addresses}}};\n"
