"""The C compiler, for CPU kernels: `extern "C"` functions over raw pointers, no Torch header."""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import struct
from pathlib import Path

from jitkern import closure as closures
from jitkern import config
from jitkern.closure import Closure
from jitkern.compilers.result import (
    Built,
    compile_error,
    missing_function,
    read_dependencies,
    run,
    write_log,
)
from jitkern.errors import CompileError, CompilerNotFound, TargetError
from jitkern.kernel import DTYPES, Constant, Cpp, Source, Variant
from jitkern.target import Target, this_platform

REMEDY = "apt-get install g++ (or set CC and CXX)"
_MARK = b"jitkern parameters:"
_CODES = {
    "f": "f32", "d": "f64", "h": "f16", "b": "bf16", "B": "bool", "c": "i8", "C": "u8", "s": "i16",
    "S": "u16", "i": "i32", "I": "u32", "l": "i64", "L": "u64", "v": "", "?": "",
}  # fmt: skip
# Appended to the source: lets the compiler itself write the function's parameter types into the
# artifact.
_PROBE = """
#line 1 "jitkern probe"
%s
struct float16;
struct bfloat16;
namespace jitkern_probe {
template <typename T> constexpr char code = '?';
template <typename T> constexpr char code<const T> = code<T>;
%s
template <typename T> struct parameter { static constexpr char pointer = '-', type = code<T>; };
template <typename T> struct parameter<T*> { static constexpr char pointer = '*', type = code<T>; };
template <typename F> struct list;
template <typename... P> struct list<void (*)(P...)> {
  struct { char mark[19]; char codes[2 * sizeof...(P) + 1]; } text = {
      {%s}, {parameter<P>::pointer..., parameter<P>::type..., 0}};
};
template <typename... P> struct list<void (*)(P...) noexcept> : list<void (*)(P...)> {};
}
extern "C" __attribute__((used)) constexpr auto jitkern_parameters = \
jitkern_probe::list<decltype(&%s)>{};
"""
_SPELLED = {
    "f": "float", "d": "double", "h": "float16", "b": "bfloat16", "B": "bool",
    "c": "signed char", "C": "unsigned char", "s": "short", "S": "unsigned short",
    "i": "int", "I": "unsigned", "v": "void",
}  # fmt: skip


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
        unit.write_text(
            f'#line 1 "{path}"\n' + path.read_text() + ("" if _is_c(source) else _probe(variant))
        )
        command = [
            *shlex.split(tool), *self.flags(source, target),
            *(f"-D{name}={_macro(variant, name, value)}" for name, value in variant.template),
            *(f"-I{root.path}" for root in source.roots),
            f"-ffile-prefix-map={source.folder}=.", f"-ffile-prefix-map={build}=.",
            "-MMD", "-MF", "deps.d", "-o", "out.so", unit.name,
        ]  # fmt: skip
        if _is_c(source):
            command += ["-aux-info", "prototypes"]
        done = run(command, source=source, folder=build)
        write_log(staging, command, done.stdout)
        if done.returncode:
            hint = missing_function(
                variant, re.findall(r'extern\s+"C"[^;{(]*?(\w+)\s*\(', path.read_text())
            )
            raise compile_error(variant, target, command, done.stdout, hint)
        opened = [build / name for name in read_dependencies(build / "deps.d")]
        closures.check(source, closure, (f for f in opened if f != unit), (), variant.op)
        binary = (build / "out.so").read_bytes()
        parameters = (
            _prototype(variant, build / "prototypes") if _is_c(source) else _parameters(binary)
        )
        if variant.function not in _exported(binary):
            raise CompileError(
                f'{variant.op}: `{variant.function}` in {path} must be declared extern "C", '
                "and not static",
                op=variant.op,
            )
        artifact = f"{variant.function}.{hashlib.sha256(binary).hexdigest()[:8]}.so"
        (staging / artifact).write_bytes(binary)
        return Built(
            compiler, {"artifact": artifact, "symbol": variant.function, "parameters": parameters}
        )


def _exported(binary: bytes) -> set[str]:
    """Names in the dynamic symbol table of a 64-bit ELF file that it defines for others."""
    (sections,) = struct.unpack_from("<Q", binary, 0x28)
    size, count = struct.unpack_from("<HH", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", binary, sections + i * size) for i in range(count)]
    names = set()
    for _, kind, _, _, offset, length, link, *_ in headers:
        if kind == 11:  # SHT_DYNSYM
            strings = headers[link][4]
            for at in range(offset, offset + length, 24):
                name, info, _, section = struct.unpack_from("<IBBH", binary, at)
                if section and info >> 4:  # defined, and not local
                    start = strings + name
                    names.add(binary[start : binary.index(b"\0", start)].decode())
    return names


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


def _macro(variant: Variant, name: str, value: Constant) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return repr(value)
    if not DTYPES[value].host:
        raise CompileError(
            f"{variant.op}: {name}={value}: C++ on the CPU has no such type", op=variant.op
        )
    return DTYPES[value].host


def _probe(variant: Variant) -> str:
    undefine = "\n".join(f"#undef {name}" for name, _ in variant.template)
    codes = "\n".join(
        f"template <> constexpr char code<{name}> = '{code}';" for code, name in _SPELLED.items()
    )
    codes += "".join(
        f"\ntemplate <> constexpr char code<{sign}{name}> = '{code}';"
        for sign, code in (("", "l"), ("unsigned ", "L"))
        for name in ("long", "long long")
    )
    codes += "\ntemplate <> constexpr char code<char> = 'c';"
    mark = ",".join(f"'{chr(c)}'" for c in _MARK)
    return _PROBE % (undefine, codes, mark, variant.function)


def _parameters(binary: bytes) -> list[str]:
    start = binary.index(_MARK) + len(_MARK)
    text = binary[start : binary.index(b"\0", start)].decode()
    half = len(text) // 2
    return [
        ("*" if pointer == "*" else "") + _CODES[code]
        for pointer, code in zip(text[:half], text[half:])
    ]


def _prototype(variant: Variant, listing: Path) -> list[str]:
    """Parameter codes from gcc's -aux-info, which lists the prototypes of a C file."""
    found = re.search(rf"\b{re.escape(variant.function)} \(([^()]*)\);", listing.read_text())
    if not found:
        raise CompileError(
            f"{variant.op}: {variant.source.paths[0]} has no function `{variant.function}`",
            op=variant.op,
        )
    names = {name: _CODES[code] for code, name in _SPELLED.items()}
    names |= {
        "char": "i8",
        "void": "",
        "_Bool": "bool",
        "long": "i64",
        "unsigned long": "u64",
        "unsigned int": "u32",
        "short int": "i16",
    }
    names |= {
        f"{sign}int{bits}_t": f"{code}{bits}"
        for sign, code in (("", "i"), ("u", "u"))
        for bits in (8, 16, 32, 64)
    }
    names |= {
        "long int": "i64",
        "long long int": "i64",
        "long unsigned int": "u64",
        "long long unsigned int": "u64",
    }
    parameters = []
    for parameter in found.group(1).split(",") if found.group(1) != "void" else []:
        words = (
            re.sub(r"\b(const|restrict|volatile)\b", " ", parameter)
            .replace("*", " * ")
            .split()[:-1]
        )  # less its name
        base = " ".join(word for word in words if word != "*")
        parameters.append(("*" if "*" in words else "") + names.get(base, ""))
    return parameters
