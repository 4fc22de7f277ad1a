"""A probe that tells the parameter types of a C or C++ function, and calls it.

It is appended to the source. The compiler writes the types into the artifact. FUNCTION takes an
array of addresses, and calls the function with the values there. All names of the probe begin with
`jk_`, since any other name may be a macro of the source.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterable

from jitkern.compilers.result import no_function
from jitkern.errors import CompileError
from jitkern.source import cpp_text
from jitkern.source.dtypes import DTYPES, SYNONYMS
from jitkern.source.kinds import FUNCTION, Variant

NO_RESULT = "a kernel function returns nothing"
_MARK = b"jitkern parameters:"
_LETTERS = dict(zip(DTYPES, string.ascii_lowercase))  # by which a probe writes the codes
_CODES = {letter: code for code, letter in _LETTERS.items()} | {"?": ""}
_SYNONYMS = {name: _LETTERS[code] for name, code in SYNONYMS.items()}
_IN_CPP = {d.host: _LETTERS[code] for code, d in DTYPES.items() if d.host} | _SYNONYMS
_IN_C = {
    "_Bool" if code == "bool" else d.host: _LETTERS[code] for code, d in DTYPES.items() if d.ctype
} | _SYNONYMS
_ADDRESS = _LETTERS["i64"]
_KEPT = '__attribute__((used, visibility("default")))'
# A pointer to pointers counts as a pointer to addresses.
_PROBE = f"""
#line 1 "jitkern probe"
%s
struct float16;
struct bfloat16;
struct float8_e4m3fn;
namespace jitkern_probe {{
template <typename jk_T> constexpr char jk_code = '?';
template <typename jk_T> constexpr char jk_code<const jk_T> = jk_code<jk_T>;
template <typename jk_T> constexpr char jk_code<volatile jk_T> = jk_code<jk_T>;
template <typename jk_T> constexpr char jk_code<const volatile jk_T> = jk_code<jk_T>;
template <typename jk_T> constexpr char jk_code<jk_T*> = '{_ADDRESS}';
%s
template <typename jk_T> struct jk_element {{ using jk_type = jk_T; }};
template <typename jk_T> struct jk_element<jk_T[]> : jk_element<jk_T> {{}};
template <typename jk_T, decltype(sizeof 0) jk_N>
struct jk_element<jk_T[jk_N]> : jk_element<jk_T> {{}};
template <typename jk_T> struct jk_parameter {{
  static constexpr char jk_pointer = '-', jk_type = jk_code<jk_T>;
}};
template <typename jk_T> struct jk_parameter<jk_T*> {{
  static constexpr char jk_pointer = '*', jk_type = jk_code<typename jk_element<jk_T>::jk_type>;
}};
template <typename jk_T> struct jk_value {{ using jk_type = jk_T; }};
template <typename jk_T> struct jk_value<jk_T&> : jk_value<jk_T> {{}};
template <typename jk_T> struct jk_value<jk_T&&> : jk_value<jk_T> {{}};
template <typename jk_F> struct jk_list {{
  static_assert(sizeof(jk_F) == 0, "{NO_RESULT}");
  int jk_text;
  static void jk_enter(jk_F, void**) {{}}
}};
template <typename... jk_P> struct jk_list<void (*)(jk_P...)> {{
  struct jk_call {{  // in braces, so that its arguments are made in their order
    jk_call(void (*jk_f)(jk_P...), jk_P... jk_p) {{ jk_f(static_cast<jk_P&&>(jk_p)...); }}
  }};
  template <typename jk_T> static jk_T&& jk_at(void* jk_a) {{
    return static_cast<jk_T&&>(*static_cast<typename jk_value<jk_T>::jk_type*>(jk_a));
  }}
  static void jk_enter(void (*jk_f)(jk_P...), void** jk_a) {{
    jk_call{{jk_f, jk_at<jk_P>(*jk_a++)...}};
    (void)jk_a;
  }}
  struct {{ char jk_mark[19]; char jk_codes[2 * sizeof...(jk_P) + 1]; }} jk_text = {{
      {{%s}}, {{jk_parameter<jk_P>::jk_pointer..., jk_parameter<jk_P>::jk_type..., 0}}}};
}};
template <typename... jk_P>
struct jk_list<void (*)(jk_P...) noexcept> : jk_list<void (*)(jk_P...)> {{}};
}}
extern "C" {_KEPT} constexpr auto jitkern_parameters = \\
jitkern_probe::jk_list<decltype(%s)>{{}};
extern "C" {_KEPT} void {FUNCTION}(void** jk_a) {{
  jitkern_probe::jk_list<decltype(%s)>::jk_enter(%s, jk_a);
}}
"""
# C cannot take a function's type apart, so a second function gets the same parameters, as gcc lists
# them, and a structure has them as members. An array of unknown size is compatible with every array
# of its elements. The 3 stops warnings.
_PROBE_OF_C = f"""
# 1 "jitkern probe" 3
%s
#define jitkern_pointer(x) (__builtin_classify_type(x) == 5 ? '*' : '-')
#define jitkern_type(x) _Generic((x), %s default: '?')
{_KEPT} void {FUNCTION}(void **jk_a) {{
  struct {{ %s }} jk_p;
  %s
  (void)jk_a, (void)jk_p;
  %s(%s);
}}
__attribute__((used)) static void jitkern_parameters(%s) {{
  __attribute__((used)) static const char text[] = {{%s, 0}};
}}
"""


def probe(address: str, macros: Iterable[str]) -> str:
    """The probe for the function at `address`, which also ends the `macros`."""
    codes = "\n".join(
        f"template <> constexpr char jk_code<{name}> = '{code}';" for name, code in _IN_CPP.items()
    )
    return _PROBE % (_undefined(macros), codes, _characters(_MARK), address, address, address)


def probe_of_c(variant: Variant, macros: Iterable[str], listing: str) -> str:
    """The same probe for C. Raises CompileError.

    listing: the prototypes that gcc's -aux-info wrote.
    """
    name = re.escape(variant.function)
    match = re.search(rf"F \*/ .*?\b{name} \((.*)\); /\* \((.*?)\)", listing)
    if not match:
        defined = cpp_text.functions_in(cpp_text.read(variant.source.paths[0]))
        functions = (function for function in defined if function.defined)
        raise CompileError(f"{variant.op}: {no_function(variant, functions)}", op=variant.op)
    # gcc lists `_Complex` as the macro of <complex.h>, and sizes of variable length as none
    parameters = re.sub(r"\bcomplex (?=long double|double|float)", "_Complex ", match.group(1))
    parameters = re.sub(r"(?:\[[^][]*\])+", "[]", parameters)
    names = re.findall(r"\w+", match.group(2))
    codes = (f"jitkern_{part}({name})" for part in ("pointer", "type") for name in names)
    text = ", ".join([_characters(_MARK), *codes])
    kinds = " ".join(_associations())
    members = "; ".join([*_apart(parameters if names else ""), ""])
    read = " ".join(
        f"__builtin_memcpy((void *)&jk_p.{name}, jk_a[{i}], sizeof jk_p.{name});"
        for i, name in enumerate(names)
    )
    passed = ", ".join(f"jk_p.{name}" for name in names)
    head = _undefined(macros), kinds, members, read, variant.function, passed
    return _PROBE_OF_C % (*head, parameters, text)


def _apart(parameters: str) -> list[str]:
    """Split a list of parameters at its commas outside of parentheses."""
    parts, depth = [""], 0
    for letter in parameters:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _associations() -> Iterable[str]:
    """The cases of `_Generic`: one for each type of a parameter."""
    for name, code in _IN_C.items():
        yield f"{name}: '{code}',"
        for qualifiers in ("", "const ", "volatile ", "const volatile "):
            yield f"{qualifiers}{name} *: '{code}', {qualifiers}{name} (*)[]: '{code}',"
    for name in ("void", *_IN_C):
        for one, other in itertools.product(("", "const "), repeat=2):
            yield f"{one}{name} *{other}*: '{_ADDRESS}',"


def _undefined(macros: Iterable[str]) -> str:
    return "\n".join(f"#undef {name}" for name in macros)


def _characters(text: bytes) -> str:
    return ",".join(f"'{chr(c)}'" for c in text)


def codes_in(binary: bytes) -> list[str]:
    """The parameter codes (see `ptx.signature`) that a probe left in a library."""
    start = binary.index(_MARK) + len(_MARK)
    text = binary[start : binary.index(b"\0", start)].decode()
    half = len(text) // 2
    return [_code(*both) for both in zip(text[:half], text[half:])]


def _code(pointer: str, code: str) -> str:
    """The code of one parameter; "" for types passed as structs (half types)."""
    if pointer == "*":
        return f"*{_CODES[code]}"
    kind = _CODES[code]
    return kind if kind and DTYPES[kind].ctype else ""
