"""The C compiler, for CPU kernels: functions and templates over raw pointers, no Torch header."""

from __future__ import annotations

import functools
import hashlib
import os
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
        language = ("-std=c17",) if source.is_c else ("-std=c++17",)
        native = (f"-march=x86-64-v{level}",) if source.native and level else ()
        openmp = ("-fopenmp",) if source.openmp else ()
        return ("-O3", "-fPIC", "-shared", *language, *native, *openmp, *source.flags)

    def identities(self, source: Source, target: Target) -> list[dict[str, str]]:
        return [identity(_tool(source))]

    def compile(self, variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
        from jitkern.compilers import cpp_functions, cpp_parameters  # not in a process that is warm

        source = variant.source
        assert isinstance(source, Cpp)
        if target.platform != this_platform():
            raise TargetError(
                f"{variant.op} for {target}: host code is built on its own platform, "
                f"here {this_platform()}"
            )
        tool = _tool(source)
        compiler = identity(tool)
        build = staging / "build"
        build.mkdir()
        unit = _Unit(variant, target, staging, [*shlex.split(tool), *self.flags(source, target)])
        address, macros = cpp_functions.instantiated(variant, unit.text, closure)
        if source.is_c:
            unit.compile("", macros, "-fsyntax-only", "-aux-info", "prototypes")
            listing = (build / "prototypes").read_text(errors="replace")
            unit.compile(cpp_parameters.probe_of_c(variant, macros, listing), macros)
        else:
            unit.compile(cpp_parameters.probe(address, macros), macros)
        opened = [build / name for name in read_dependencies(build / "deps.d")]
        closures.check(source, closure, (f for f in opened if f != unit.path), (), variant.op)
        binary = (build / "out.so").read_bytes()
        parameters = cpp_parameters.found(binary)
        name = re.sub(r"\W+", "_", variant.function)
        artifact = f"{name}.{hashlib.sha256(binary).hexdigest()[:8]}.so"
        (staging / artifact).write_bytes(binary)
        symbol = cpp_functions.symbol(variant, binary)
        return Built(compiler, {"artifact": artifact, "symbol": symbol, "parameters": parameters})


class _Unit:
    """The file of a variant, compiled in `staging` with what is appended to it."""

    def __init__(self, variant: Variant, target: Target, staging: Path, command: list[str]) -> None:
        self._variant, self._target, self._staging = variant, target, staging
        self._command = command
        self._source = variant.source.paths[0]
        self.path = staging / "build" / self._source.name
        self.text = cxx.read(self._source)

    def compile(self, probe: str, macros: dict[str, str], *options: str) -> None:
        """Raises CompileError."""
        from jitkern.compilers import cpp_functions

        variant = self._variant
        head = f'{cpp_functions.TYPES}\n#line 1 "{self._source}"\n'
        cxx.write(self.path, f"{head}{self.text}{probe}")
        command = [*self._command, *_options(variant.source, macros, self.path), *options]
        done = run(command, source=variant.source, folder=self.path.parent)
        write_log(self._staging, command, done.stdout)
        if done.returncode:
            hint = cpp_functions.hint(variant, self.text, done.stdout)
            raise compile_error(variant, self._target, command, done.stdout, hint)


def _options(source: Source, macros: dict[str, str], unit: Path) -> list[str]:
    """Of a build in the directory of `unit`: none that changes the artifact but for the macros."""
    return [
        *(f"-D{name}={value}" for name, value in macros.items()),
        *(f"-I{root.path}" for root in source.roots),
        f"-ffile-prefix-map={source.folder}=.", f"-ffile-prefix-map={unit.parent}=.",
        "-MMD", "-MF", "deps.d", "-o", "out.so", unit.name,
        *(["-Wl,-z,defs"] if source.others else []),
    ]  # fmt: skip


def _tool(source: Source) -> str:
    assert isinstance(source, Cpp)
    return config.current().cc if source.is_c else config.current().cxx


@functools.cache
def searched(tool: str) -> list[Path]:
    """The directories that the C++ compiler `tool` searches for headers by itself."""
    command = [*shlex.split(tool), "-E", "-v", "-x", "c++", os.devnull]
    said = run(command, source=Cpp("x.cpp"), folder=Path("/")).stdout
    listed = said.partition("search starts here:")[2].partition("End of search list")[0]
    return [Path(line.strip()) for line in listed.splitlines() if line.startswith(" /")]


def identity(tool: str) -> dict[str, str]:
    """Name and version of the C or C++ compiler `tool`. Raises CompilerNotFound."""
    program, *rest = shlex.split(tool)  # CXX="ccache g++"
    found = shutil.which(program, path=config.current().environment.get("PATH"))
    if not found:
        raise CompilerNotFound(f"no C compiler `{tool}` on PATH: {REMEDY}", remedy=REMEDY)
    done = run([found, *rest, "--version"], source=Cpp("x.c"), folder=Path(found).parent)
    return {"name": "cc", "version": done.stdout.partition("\n")[0].strip()}
