"""The C compiler, for CPU kernels: functions and templates over raw pointers, no Torch header."""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
from pathlib import Path

from jitkern import closure as closures
from jitkern import config, cxx
from jitkern.closure import Closure
from jitkern.compilers.result import Built, compile_error, read_dependencies, run, write_log
from jitkern.errors import CompilerNotFound, TargetError
from jitkern.kernel import Cpp, Source, Variant
from jitkern.target import Target, this_platform

REMEDY = "apt-get install g++ (or set CC and CXX)"


class Cc:
    """g++ or clang++ for C++, cc for C."""

    def target(self, source: Source, target: Target) -> Target:
        assert isinstance(source, Cpp)
        return target.for_host_code(native=source.native)

    def flags(self, source: Source, target: Target) -> tuple[str, ...]:
        assert isinstance(source, Cpp)
        _, _, level = target.arch.partition("_v")
        language = ("-std=c17",) if _is_c(source) else ("-std=c++17",)
        native = (f"-march=x86-64-v{level}",) if source.native and level else ()
        openmp = ("-fopenmp",) if source.openmp else ()
        return ("-O3", "-fPIC", "-shared", *language, *native, *openmp, *source.flags)

    def identities(self, source: Source, target: Target) -> list[dict[str, str]]:
        return [identity(_tool(source))]

    def compile(self, variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
        from jitkern.compilers import cpp_functions, cpp_parameters  # not in a process that is warm

        source = variant.source
        if target.platform != this_platform():
            raise TargetError(
                f"{variant.op} for {target}: host code is built on its own platform, "
                f"here {this_platform()}"
            )
        tool = _tool(source)
        compiler = identity(tool)
        path = source.paths[0]
        build = staging / "build"
        build.mkdir()
        unit = build / path.name
        text = cxx.read(path)
        address, macros = cpp_functions.instantiated(variant, text, closure)
        probe = "" if _is_c(source) else cpp_parameters.probe(address, macros)
        cxx.write(unit, f'#line 1 "{path}"\n{text}{probe}')
        command = [*shlex.split(tool), *self.flags(source, target), *_options(source, macros, unit)]
        done = run(command, source=source, folder=build)
        write_log(staging, command, done.stdout)
        if done.returncode:
            hint = cpp_functions.hint(variant, text, done.stdout)
            raise compile_error(variant, target, command, done.stdout, hint)
        opened = [build / name for name in read_dependencies(build / "deps.d")]
        closures.check(source, closure, (f for f in opened if f != unit), (), variant.op)
        binary = (build / "out.so").read_bytes()
        parameters = cpp_parameters.found(variant, binary, build / "prototypes")
        name = re.sub(r"\W+", "_", variant.function)
        artifact = f"{name}.{hashlib.sha256(binary).hexdigest()[:8]}.so"
        (staging / artifact).write_bytes(binary)
        symbol = cpp_functions.symbol(variant, binary)
        return Built(compiler, {"artifact": artifact, "symbol": symbol, "parameters": parameters})


def _options(source: Source, macros: dict[str, str], unit: Path) -> list[str]:
    """Of a build in the directory of `unit`: none that changes the artifact but for the macros."""
    return [
        *(f"-D{name}={value}" for name, value in macros.items()),
        *(f"-I{root.path}" for root in source.roots),
        f"-ffile-prefix-map={source.folder}=.", f"-ffile-prefix-map={unit.parent}=.",
        "-MMD", "-MF", "deps.d", "-o", "out.so", unit.name,
        *(["-Wl,-z,defs"] if source.others else []),
        *(["-aux-info", "prototypes"] if _is_c(source) else []),
    ]  # fmt: skip


def _is_c(source: Source) -> bool:
    return source.files[0].endswith(".c")


def _tool(source: Source) -> str:
    return config.current().cc if _is_c(source) else config.current().cxx


def identity(tool: str) -> dict[str, str]:
    """Name and version of the C or C++ compiler `tool`. Raises CompilerNotFound."""
    program, *rest = shlex.split(tool)  # CXX="ccache g++"
    found = shutil.which(program, path=config.current().environment.get("PATH"))
    if not found:
        raise CompilerNotFound(f"no C compiler `{tool}` on PATH: {REMEDY}", remedy=REMEDY)
    done = run([found, *rest, "--version"], source=Cpp("x.c"), folder=Path(found).parent)
    return {"name": "cc", "version": done.stdout.partition("\n")[0].strip()}
