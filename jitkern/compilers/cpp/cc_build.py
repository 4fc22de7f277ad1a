"""Compile a kernel with the C++ compiler, along with a probe that lists its parameter types."""

from __future__ import annotations

import functools
import itertools
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
_OF_BOTH = (  # compiling and linking; no flag here has code of its own linked in
    "-pthread", "-fopenmp", "-fsanitize", "-fprofile-", "--coverage", "-stdlib=",
    "-static-libg", "-static-libstdc++", "-nostdlib", "-nodefaultlibs", "-fuse-ld=", "-B", "-m32",
    "-m64", "-mx32", "--sysroot", "-target", "--target=", "--gcc-toolchain=",
)  # fmt: skip
_WITH_ARGUMENT = frozenset((
    "-l", "-L", "-Xlinker", "-T", "-z", "-u", "-e", "-B", "-target", "--sysroot", "-include", "-I",
    "-imacros", "-isystem", "-iquote", "-idirafter", "-iprefix", "-iwithprefix", "-isysroot",
    "-iwithprefixbefore", "-D", "-U", "-x", "-A", "-MF", "-MT", "-MQ", "--param", "-Xassembler",
    "-Xpreprocessor", "-Xclang", "-mllvm",
))  # fmt: skip
REMEDY = "apt-get install g++ (or set CC and CXX)"


def build(
    variant: Variant, target: Target, closure: Closure, staging: Path, flags: Sequence[str]
) -> Built:
    """Do what `Compiler.compile` promises."""
    source = variant.source
    assert isinstance(source, Cpp)
    check_platform(variant.op, target)
    tool = config.current().cxx
    compiler = identity(tool)
    folder = staging / "build"
    folder.mkdir()
    gcc = "clang" not in compiler["version"]
    listed = dependencies.listing(_UNIT, gcc=gcc)
    compiling, linking = _parted(flags)
    unit = _Unit(variant, target, staging, [*shlex.split(tool), *compiling, *listed])
    address, macros = functions.instantiated(variant, unit.text, closure)
    unit.build(parameter_types.probe(address, macros), macros, [*_linker(tool), *linking])
    files = dependencies.in_folder(folder, [_UNIT])
    dependencies.check(source, closure, files, toolchain(tool, files), variant.op)
    dependencies.check_linker(folder, source.flags, variant.op)
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

    def build(self, probe: str, macros: dict[str, str], linker: list[str]) -> None:
        """Compile the file with `probe` appended, and link it. Raises CompileError.

        These are two commands: some flags of a compiler make a linker add code that changes the
        process which loads the library. -ffast-math adds crtfastmath.o, which flushes denormals.
        """
        head = f"{functions.TYPES}\n{cpp_text.line_directive(self._source)}"
        cpp_text.write(self.path, f"{head}{self.text}{probe}")
        number = f"-DJITKERN_TORCH={_number_of(self._target.torch)}"
        options = [*_options(self._variant.source, macros, self.path), number]
        done = self._run([*self._command, *options, "-c", self.path.name, "-o", "out.o"])
        undefined = ["-Wl,-z,defs"] if self._variant.source.others else []
        listed = [*undefined, dependencies.LINKERS_LIST, "-o", "out.so"]
        self._run([*linker, *listed], *done)

    def _run(
        self, command: list[str], *before: tuple[list[str], str]
    ) -> list[tuple[list[str], str]]:
        """Run a command; returns all commands that were run, with their outputs, for the log."""
        command, status, output = dependencies.run_listed(self._try, command)
        done = [*before, (command, output)]
        later = "".join(f"$ {shlex.join(words)}\n{said}" for words, said in done[1:])
        write_log(self._staging, done[0][0], done[0][1] + later)
        if status:
            hint = functions.hint(self._variant, self.text, output)
            raise compile_error(self._variant, self._target, command, output, hint)
        return done

    def _try(self, command: list[str]) -> tuple[int, str]:
        process = run(command, source=self._variant.source, folder=self.path.parent, shown=True)
        return process.returncode, process.stdout


def _options(source: Source, macros: dict[str, str], unit: Path) -> list[str]:
    """Options for a build in the directory of `unit`; only the macros can change the artifact."""
    return [
        *(f"-D{name}={value}" for name, value in macros.items()),
        *(f"-I{root}" for root in source.searched),
        f"-ffile-prefix-map={source.folder}=.", f"-ffile-prefix-map={unit.parent}=.",
    ]  # fmt: skip


def _number_of(torch: str) -> int:
    """Return a version of Torch as the number for `float16.h`, e.g. 2013 for 2.13.0."""
    major, minor = map(int, re.findall(r"\d+", torch)[:2])
    return 1000 * major + minor


def _parted(flags: Iterable[str]) -> tuple[list[str], list[str]]:
    """The words for compiling, and those for linking. Some are for both."""
    compiling, linking = [], ["-shared", "out.o"]
    words = iter(flags)
    for word in words:
        option = [word, *itertools.islice(words, word in _WITH_ARGUMENT)]
        is_of_linker = word.startswith(dependencies.READ_BY_LINKERS) or word[:1] != "-"
        if is_of_linker or word.startswith(_OF_BOTH):
            linking += option
        if not is_of_linker:
            compiling += option
    return compiling, linking


def _linker(tool: str) -> list[str]:
    """The command of a compiler without its flags, except for those that a linker needs."""
    words = shlex.split(tool)
    begin = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    return [*words[:begin], *_parted(words[begin:])[1][2:]]


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
