"""The parameter types of a C or C++ function, as the compiler saw them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from jitkern.errors import CompileError
from jitkern.kernel import Variant

FUNCTION = "jitkern_function"  # the pointer that a probe leaves to it
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
template <typename F> struct list {
  static_assert(sizeof(F) == 0, "a kernel function returns nothing");
  int text;
};
template <typename... P> struct list<void (*)(P...)> {
  struct { char mark[19]; char codes[2 * sizeof...(P) + 1]; } text = {
      {%s}, {parameter<P>::pointer..., parameter<P>::type..., 0}};
};
template <typename... P> struct list<void (*)(P...) noexcept> : list<void (*)(P...)> {};
}
extern "C" __attribute__((used)) constexpr auto jitkern_parameters = \
jitkern_probe::list<decltype(%s)>{};
extern "C" __attribute__((used)) constexpr auto jitkern_function = %s;
"""
_SPELLED = {
    "f": "float", "d": "double", "h": "float16", "b": "bfloat16", "B": "bool",
    "c": "signed char", "C": "unsigned char", "s": "short", "S": "unsigned short",
    "i": "int", "I": "unsigned", "v": "void",
}  # fmt: skip


def probe(address: str, macros: Iterable[str]) -> str:
    """What to append to a source: `macros` end there, and the function at `address` is spelled."""
    undefine = "\n".join(f"#undef {name}" for name in macros)
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
    return _PROBE % (undefine, codes, mark, address, address)


def found(variant: Variant, binary: bytes, prototypes: Path) -> list[str]:
    """Parameter codes (see ptx.signature), which a probe left in a library, or gcc listed for C."""
    if prototypes.is_file():
        return _of_c(variant, prototypes)
    start = binary.index(_MARK) + len(_MARK)
    text = binary[start : binary.index(b"\0", start)].decode()
    half = len(text) // 2
    return [
        ("*" if pointer == "*" else "") + _CODES[code]
        for pointer, code in zip(text[:half], text[half:])
    ]


def _of_c(variant: Variant, listing: Path) -> list[str]:
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
