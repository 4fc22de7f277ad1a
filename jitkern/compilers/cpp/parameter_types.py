"""A probe that tells the parameter types of a C++ function, and calls it.

It is appended to the source. The compiler writes the types into the artifact. FUNCTION takes an
array of addresses, and calls the function with the values there. An exception ends in FUNCTION: it
returns 1 then, with the text of the exception in TEXT bytes, else 0. The modes of floating-point
numbers (rounding, denormals) are those of the caller again afterwards. All names of the probe begin
with `jk_`, since any other name may be a macro of the source.
"""

from __future__ import annotations

import string
from collections.abc import Iterable

from jitkern.source.dtypes import DTYPES, SYNONYMS
from jitkern.source.kinds import FUNCTION, TEXT

NO_RESULT = "a kernel function returns nothing"
_MARK = b"jitkern parameters:"
_LETTERS = dict(zip(DTYPES, string.ascii_lowercase))  # by which a probe writes the codes
_CODES = {letter: code for code, letter in _LETTERS.items()} | {"?": ""}
_SYNONYMS = {name: _LETTERS[code] for name, code in SYNONYMS.items()}
_IN_CPP = {d.host: _LETTERS[code] for code, d in DTYPES.items() if d.host} | _SYNONYMS
_ADDRESS = _LETTERS["i64"]
_KEPT = '__attribute__((used, visibility("default")))'
_CAUGHT = """ catch (const std::exception& jk_e) {
    return jitkern_probe::jk_tell(jk_text, jk_e.what());
  } catch (const char* jk_e) {
    return jitkern_probe::jk_tell(jk_text, jk_e);
  } catch (...) {
    return jitkern_probe::jk_tell(jk_text, "an exception that is no std::exception");
  }"""
# A pointer to pointers counts as a pointer to addresses. <bits/exception.h> is libstdc++'s, and has
# a few lines.
_PROBE = f"""
#line 1 "jitkern probe"
%s
#ifdef __EXCEPTIONS
#if __has_include(<bits/exception.h>)
#include <bits/exception.h>
#else
#include <exception>
#endif
#define jk_try try
#define jk_caught {_CAUGHT.replace(chr(10), chr(92) + chr(10))}
#else
#define jk_try
#define jk_caught
#endif
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
struct jk_modes {{  // of floating-point numbers
#if defined __x86_64__
  unsigned jk_sse;  // whose lowest six bits note what has happened, and stay
  unsigned short jk_x87;
  void jk_read() {{
    __asm__ volatile("stmxcsr %%0" : "=m"(jk_sse));
    __asm__ volatile("fnstcw %%0" : "=m"(jk_x87));
  }}
  jk_modes() {{ jk_read(); }}
  ~jk_modes() {{
    const unsigned jk_before = jk_sse;
    const unsigned short jk_control = jk_x87;
    jk_read();
    if (jk_control != jk_x87) __asm__ volatile("fldcw %%0" : : "m"(jk_control));
    const unsigned jk_wanted = (jk_before & ~63u) | (jk_sse & 63u);
    if (jk_wanted != jk_sse) __asm__ volatile("ldmxcsr %%0" : : "m"(jk_wanted));
  }}
#elif defined __aarch64__
  unsigned long jk_control, jk_now;
  jk_modes() {{ __asm__ volatile("mrs %%0, fpcr" : "=r"(jk_control)); }}
  ~jk_modes() {{
    __asm__ volatile("mrs %%0, fpcr" : "=r"(jk_now));
    if (jk_now != jk_control) __asm__ volatile("msr fpcr, %%0" : : "r"(jk_control));
  }}
#else
  jk_modes() {{}}
  ~jk_modes() {{}}
#endif
}};
[[maybe_unused]] static int jk_tell(char* jk_to, const char* jk_text) {{
  int jk_n = 0;
  for (; jk_n < {TEXT} - 1 && jk_text[jk_n]; jk_n++) jk_to[jk_n] = jk_text[jk_n];
  jk_to[jk_n] = 0;
  return 1;
}}
}}
extern "C" {_KEPT} constexpr auto jitkern_parameters = \\
jitkern_probe::jk_list<decltype(%s)>{{}};
extern "C" {_KEPT} int {FUNCTION}(void** jk_a, char* jk_text) {{
  const jitkern_probe::jk_modes jk_kept;
  (void)jk_text;
  jk_try {{
    jitkern_probe::jk_list<decltype(%s)>::jk_enter(%s, jk_a);
    return 0;
  }} jk_caught
}}
"""


def probe(address: str, macros: Iterable[str]) -> str:
    """The probe for the function at `address`, which also ends the `macros`."""
    codes = "\n".join(
        f"template <> constexpr char jk_code<{name}> = '{code}';" for name, code in _IN_CPP.items()
    )
    return _PROBE % (_undefined(macros), codes, _characters(_MARK), address, address, address)


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
