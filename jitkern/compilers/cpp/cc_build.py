"""Compile a kernel with the C++ compiler, along with a probe that lists its parameter types."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from jitkern import config
from jitkern.compilers import dependencies
from jitkern.compilers.cpp import functions, parameter_types
from jitkern.compilers.result import (
    Built,
    binary_at,
    check_platform,
    compile_error,
    keep_binary,
    run,
    unusable,
    write_log,
)
from jitkern.errors import CompilerNotFound
from jitkern.files import trust
from jitkern.source import cpp_text, includes
from jitkern.source.closure import Closure
from jitkern.source.kinds import Cpp, Source, Variant
from jitkern.target import Target

_UNIT = "unit"  # the stem of the lists of opened files
REMEDY = "apt-get install g++ (or set CC and CXX)"


def build(
    variant: Variant, target: Target, closure: Closure, staging: Path, flags: Sequence[str]
) -> Built:
    """Do what `Compiler.compile` promises."""
    source = variant.source
    assert isinstance(source, Cpp)
    check_platform(variant.op, target)
    dependencies.refuse_profiles(source.flags, variant.op)
    tool = config.current().cxx
    compiler = identity(tool)
    folder = staging / "build"
    folder.mkdir()
    gcc = "clang" not in compiler["version"]
    listed = dependencies.listing(_UNIT, gcc=gcc)
    unit = _Unit(variant, target, staging, [*shlex.split(tool), *flags, *listed])
    address, macros = functions.instantiated(variant, unit.text, closure)
    unit.compile(parameter_types.probe(address, macros), macros)
    files = dependencies.in_folder(folder, [_UNIT])
    dependencies.check(source, closure, files, toolchain(tool, files), variant.op)
    texts = [path.read_bytes() for path in closure.paths]
    dependencies.check_unreported(folder, _UNIT, source.flags, texts, variant.op)
    binary = binary_at(folder / "out.so", variant, target, [tool])
    try:
        parameters = parameter_types.codes_in(binary)
    except ValueError:  # the end is missing
        raise unusable(variant, target, [tool]) from None
    name = re.sub(r"\W+", "_", variant.function, flags=re.ASCII)[:80]  # letters that manifests take
    artifact = keep_binary(staging, name, binary)
    return Built(compiler, {"artifact": artifact, "parameters": parameters})


class _Unit:
    """The file of a variant, compiled in `staging` with a probe appended."""

    def __init__(self, variant: Variant, target: Target, staging: Path, command: list[str]) -> None:
        self._variant, self._target, self._staging = variant, target, staging
        self._command = command
        self._source = variant.source.paths[0]
        self.path = staging / "build" / self._source.name
        self.text = cpp_text.read(self._source)

    def compile(self, probe: str, macros: dict[str, str], *options: str) -> None:
        """Compile the file with `probe` appended. Raises CompileError."""
        variant = self._variant
        head = f"{functions.TYPES}\n{cpp_text.line_directive(self._source)}"
        cpp_text.write(self.path, f"{head}{self.text}{probe}")
        command = [*self._command, *_options(variant.source, macros, self.path), *options]
        command.append(dependencies.LINKERS_LIST)
        command, status, output = dependencies.run_listed(self._run, command)
        write_log(self._staging, command, output)
        if status:
            hint = functions.hint(variant, self.text, output)
            raise compile_error(variant, self._target, command, output, hint)

    def _run(self, command: list[str]) -> tuple[int, str]:
        process = run(command, source=self._variant.source, folder=self.path.parent, shown=True)
        return process.returncode, process.stdout


def _options(source: Source, macros: dict[str, str], unit: Path) -> list[str]:
    """Options for a build in the directory of `unit`; only the macros can change the artifact."""
    return [
        *(f"-D{name}={value}" for name, value in macros.items()),
        *(f"-I{root}" for root in source.searched),
        f"-ffile-prefix-map={source.folder}=.", f"-ffile-prefix-map={unit.parent}=.",
        "-o", "out.so", unit.name,
        *(["-Wl,-z,defs"] if source.others else []),
    ]  # fmt: skip


def toolchain(tool: str, files: Iterable[Path]) -> list[Path]:
    """The directories of headers and libraries that the C++ compiler `tool` searches by itself.

    files: the files that a build opened. If libraries among them lie outside of these directories
    (as links lead out of them), the directories of the files that `tool` links into any library are
    added. /usr/local/include belongs to the machine, not to the compiler.
    """
    state = _state_of(tool)
    known = _searched(tool, state)
    linked = [path.resolve() for path in files if path.suffix in (".a", ".o")]
    folders = {folder.resolve() for folder in known}
    if all(folders.intersection(path.parents) for path in linked):
        return known
    return [*known, *_linked(tool, state)]


def _state_of(tool: str) -> tuple[int, ...]:
    """Return numbers that change when a compiler is upgraded; () without a compiler."""
    program = _program(tool)
    return trust.identity(os.stat(program)) if program else ()  # noqa: PTH116


def _program(tool: str) -> str | None:
    """The path of the program in CXX="ccache g++"."""
    return shutil.which(shlex.split(tool)[0], path=config.current().environment.get("PATH"))


@functools.cache
def _searched(tool: str, _state: tuple[int, ...]) -> list[Path]:
    source, root = Cpp("x.cpp"), Path("/")
    command = [*shlex.split(tool), "-E", "-v", "-x", "c++", os.devnull]
    output = run(command, source=source, folder=root).stdout
    listed = output.partition("search starts here:")[2].partition("End of search list")[0]
    headers = [line.strip() for line in listed.splitlines() if line.startswith(" /")]
    output = run([*shlex.split(tool), "-print-search-dirs"], source=source, folder=root).stdout
    libraries = re.findall(r"(?m)^libraries: =?(.*)$", output)
    folders = [*headers, *":".join(libraries).split(":")]
    return [Path(folder) for folder in folders if folder and folder != includes.SITE]


@functools.cache
def _linked(tool: str, _state: tuple[int, ...]) -> list[Path]:
    """The directories of the files that are linked into every library."""
    with tempfile.TemporaryDirectory(prefix="jitkern-") as name:
        Path(name, "empty.cpp").touch()
        flags = ("-shared", "-fPIC", "empty.cpp", "-o", "empty.so", dependencies.LINKERS_LIST)
        run([*shlex.split(tool), *flags], source=Cpp("x.cpp"), folder=Path(name))
        return [path.parent for path in dependencies.in_folder(Path(name), [])]


def identity(tool: str) -> dict[str, str]:
    """Name and version of the C or C++ compiler `tool`. Raises CompilerNotFound."""
    path = _program(tool)
    if not path:
        kind = "C" if tool == config.current().cc else "C++"
        raise CompilerNotFound(f"no {kind} compiler `{tool}` on PATH: {REMEDY}", remedy=REMEDY)
    command = [path, *shlex.split(tool)[1:], "--version"]
    process = run(command, source=Cpp("x.cpp"), folder=Path(path).parent)
    return {"name": "cc", "version": process.stdout.partition("\n")[0].strip()}
