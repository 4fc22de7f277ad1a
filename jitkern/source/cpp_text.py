"""C++ and CUDA files read as text: the functions they declare.

No preprocessor runs: all branches of an `#if` are read. A text whose brackets do not balance reads
as if it declared nothing.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from jitkern.named_tuple import NamedTuple

_SKIPPED = r"""(?xsm)
      //(?:\\\r?\n|[^\n])*
    | /\*.*?\*/
    | \b(?:u8|[uUL])?R"(?P<mark>[^\s()\\]{0,16})\(.*?\)(?P=mark)"
    | "(?:\\.|[^"\\\n])*"
    | (?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'
    | ^[ \t]*\#(?:\\\r?\n|/\*.*?\*/|[^\n])*"""
_SCOPE = r"(?:inline\s+)?namespace\b\s*(?P<name>[\w:]*)[^{};=]*\{|extern\s*\"\s*\"\s*\{"
_NAME = (
    r"(?P<name>(?:\w+\s*(?:<[^{};()]*>\s*)?::\s*)*(?:operator\b[^(]*|~?\w+))\s*(?:<[^{};]*>)?\s*$"
)
_NO_FUNCTION = (
    r"(?:typedef\s+)?(?:struct|class|union|enum)\b(?!\s+\w+[\s*&]+\w+\s*\()"
    r"|(?:typedef|using|static_assert|asm)\b"
)
_DEFINE = r"(?m)^[ \t]*#[ \t]*define[ \t]+(\w+)(?:\([^)\n]*\))?[ \t]((?:\\\r?\n|[^\n])*)"
_NO_NAMES = {"alignas", "decltype", "explicit", "noexcept", "requires", "throw"}


class CppFunction(NamedTuple):
    """A function, its name qualified by the namespaces around it.

    template: the names of its template parameters; None for no template. parameters: the text
    of its parameter list. words: the words before its name. defined: whether it has a body.
    """

    name: str
    template: tuple[str, ...] | None
    parameters: str
    words: frozenset[str]
    defined: bool

    @property
    def display_name(self) -> str:
        """The function as a message lists it: `a::scale<T, N>`."""
        return self.name + (f"<{', '.join(self.template)}>" if self.template else "")


class Unbalanced(Exception):
    """The brackets of a text do not match, for example where a macro holds only one of a pair."""


def read(path: Path) -> str:
    """A file's text without a byte order mark; bytes that are not UTF-8 become surrogates."""
    return path.read_text(encoding="utf-8-sig", errors="surrogateescape")


def write(path: Path, text: str) -> None:
    """Write a text that came from `read`, with the bytes it had in its file."""
    path.write_text(text, encoding="utf-8", errors="surrogateescape")


def line_directive(path: Path) -> str:
    """The `#line` directive after which compilers report the text as the file at `path`."""
    literal = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'#line 1 "{literal}"\n'


def functions_in(text: str, macros: Iterable[str] = ()) -> list[CppFunction]:
    """The functions that a file declares at namespace scope; for `macros` see `code_of`."""
    shown = code_of(text, macros)
    try:
        return list(_functions(shown, 0, len(shown)))
    except Unbalanced:
        return []


def kernels_in(text: str, headers: Iterable[str] = ()) -> list[CppFunction]:
    """The `__global__` functions of a text; a declaration is left out if the text defines it.

    headers: texts that may define a macro for `__global__`, as the file itself may.
    """
    texts = list(headers)
    marks = {"__global__"} | macros_for({"__global__"}, [text, *texts])
    kernels = [f for f in functions_in(text, declaring_macros(texts)) if f.words & marks]
    return [
        f for f in kernels if f.defined or not any(f.name == k.name and k.defined for k in kernels)
    ]


def macros_for(words: set[str], texts: Iterable[str]) -> set[str]:
    """Names of macros whose text contains one of these words, directly or through other macros."""
    used: dict[str, set[str]] = {}  # the branches of an `#if` may all define one macro
    for name, body in macros_in(texts):
        used.setdefault(name, set()).update(re.findall(r"\w+", body))
    names = set(words)
    while new := {name for name, uses in used.items() if uses & names} - names:
        names |= new
    return names - words


def macros_in(texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The name and the text of each `#define`."""
    for text in texts:
        yield from re.findall(_DEFINE, text)


def named(functions: Iterable[CppFunction], name: str) -> list[CppFunction]:
    """The functions that `name` may refer to: `k`, `a::k`, `k<float>`, `k(float*)`."""
    plain = plain_name(name)
    return [f for f in functions if f.name == plain or f.name.endswith(f"::{plain}")]


def overloads(functions: Iterable[CppFunction], name: str) -> str:
    """A hint for a name that means several functions or a template; "" if no function matches."""
    matches = dict.fromkeys(named(functions, name))
    templates = [f.template for f in matches if f.template]
    if len(matches) == len(templates) == 1:
        listed = ", ".join(templates[0])
        given = ", ".join(f'"{parameter}": ...' for parameter in templates[0])
        plain = plain_name(name)
        return (
            f"`{plain}` is a template of <{listed}>: name all of them, as "
            f"`{plain}[{{{given}}}](...)` does"
        )
    listed = ", ".join(dict.fromkeys(f"`{f.name}({f.parameters})`" for f in matches))
    return listed and f"`{name}` is overloaded; name one: {listed}"


def plain_name(name: str) -> str:
    """The name `a::k` of `a::k<float>` and of `a::k(float*, int)`."""
    return re.split(r"[<(]", name, maxsplit=1)[0].strip().removeprefix("::")


def last_name(name: str) -> str:
    """The name `k` of `a::k<float>` and of `a::k(float*, int)`."""
    return plain_name(name).rpartition("::")[2]


def masked(text: str) -> str:
    """The text with comments, preprocessor lines and strings blanked out; quotes stay."""

    def blank(match: re.Match[str]) -> str:
        spaces = blanks(match.group())
        return f'"{spaces[1:-1]}"' if match.group()[0] == '"' else spaces

    return re.sub(_SKIPPED, blank, text)


def code_of(text: str, macros: Iterable[str] = ()) -> str:
    """The masked text; calls of macros that expand to whole declarations are blanked too.

    macros: names of more macros of this kind, from other files (see `declaring_macros`).
    """
    shown = masked(text)
    names = declaring_macros([text]).union(macros)
    parts, done = [], 0
    for call in re.finditer(r"(?m)(?:^|(?<=[;}]))[ \t]*(\w+)[ \t]*\(", shown):
        if call[1] in names and call.start() >= done:
            with contextlib.suppress(Unbalanced):
                end = closing(shown, call.end() - 1) + 1
                parts += [shown[done : call.start()], blanks(shown[call.start() : end])]
                done = end
    return "".join([*parts, shown[done:]])


def declaring_macros(texts: Iterable[str]) -> set[str]:
    """Names of macros that expand to whole declarations, so that their calls need no `;`."""
    return {name for name, body in macros_in(texts) if body.rstrip().endswith(("}", ";"))}


def blanks(text: str) -> str:
    """The text with a blank in place of each character except for line ends."""
    return re.sub(r"[^\r\n]", " ", text)


def _functions(shown: str, begin: int, end: int, scope: str = "") -> Iterator[CppFunction]:
    """The functions between two offsets; namespaces and `extern "C"` blocks are entered."""
    scopes = re.compile(_SCOPE)
    while (begin := _past(r"[\s;]*", shown, begin)) < end:
        opened = scopes.match(shown, begin, end)
        if opened:
            close = closing(shown, opened.end() - 1)
            name = opened.group("name")
            inner = f"{scope}{name}::" if name else scope
            yield from _functions(shown, opened.end(), close, inner)
            begin = close + 1
        else:
            function, begin = _declared(shown, begin, end, scope)
            if function:
                yield function


def _declared(shown: str, begin: int, end: int, scope: str) -> tuple[CppFunction | None, int]:
    """The function that the declaration at an offset is of, if it is, and where it ends."""
    rest = _past_templates(shown, begin)
    at, sign = _next(shown, rest, end, "={;")
    while sign == "=" and re.search(r"\boperator[^\w(]*$", shown[rest:at]):
        at, sign = _next(shown, at + 1, end, "={;")
    parts = None if sign == "=" else _parameters(shown[rest:at])
    body = (at, closing(shown, at)) if sign == "{" else None
    while body and parts and re.compile(r"\s*[,{]").match(shown, body[1] + 1):
        at, sign = _next(shown, body[1] + 1, end, "{;")  # after an initialiser: `: x{0} {}`
        body = (at, closing(shown, at)) if sign == "{" else None
    past = body[1] if body and parts else _next(shown, at, end, ";")[0]
    after = min(past + 1, end)
    if not parts:
        return None, after
    first, last, name = parts
    parameters = re.sub(r"\s+", " ", shown[rest + first + 1 : rest + last]).strip()
    words = frozenset(re.findall(r"\w+", shown[begin : rest + first]))
    template = _template_names(shown[begin:rest])
    return CppFunction(scope + name, template, parameters, words, body is not None), after


def _next(shown: str, at: int, end: int, signs: str) -> tuple[int, str]:
    """The offset and the text of the first of these signs outside of brackets; else (end, "")."""
    pattern = re.compile(r"[][(){}=;]")
    while match := pattern.search(shown, at, end):
        at, sign = match.start(), match.group()
        if sign in signs:
            return at, sign
        if sign in "])}":
            raise Unbalanced
        at = closing(shown, at) + 1 if sign in "[({" else at + 1
    return end, ""


def closing(shown: str, at: int) -> int:
    """The offset of the bracket that closes the `(`, `[` or `{` at `at`. Raises Unbalanced.

    Only brackets of its kind count, also those in comments and strings: blank these out before.
    """
    depth, open_, close = 0, shown[at], {"(": ")", "[": "]", "{": "}"}[shown[at]]
    for match in re.compile(f"[{re.escape(open_ + close)}]").finditer(shown, at):
        depth += 1 if match.group() == open_ else -1
        if not depth:
            return match.start()
    raise Unbalanced


def _past(pattern: str, shown: str, at: int) -> int:
    match = re.compile(pattern).match(shown, at)
    return match.end() if match else at


def _past_templates(shown: str, at: int) -> int:
    """The offset after any number of `template <...>`."""
    while (opened := _past(r"template\s*<", shown, at)) != at:
        at, depth = opened, 1
        while depth:
            match = re.compile(r"[<>(]").search(shown, at)
            if not match:
                raise Unbalanced
            at = closing(shown, match.start()) if match.group() == "(" else match.start()
            depth += {"<": 1, ">": -1}.get(match.group(), 0)
            at += 1
        at = _past(r"\s*(?:requires\s*\([^)]*\)\s*)?", shown, at)
    return at


def _parameters(head: str) -> tuple[int, int, str] | None:
    """The offsets of a function's parameter list in its head without templates, and its name."""
    if re.match(_NO_FUNCTION, head):
        return None
    last = None
    for opened in re.finditer(r"\(", head):
        begin = opened.start()
        if last and begin < last[1]:
            continue  # inside of the last list
        if last and re.search(r"(?<!:):(?!:)", head[last[1] : begin]):
            break  # the initialisers of a constructor
        name = re.search(_NAME, head[:begin])
        if name and not _is_specifier(name.group("name")):
            last = (begin, closing(head, begin), re.sub(r"\s", "", name.group("name")))
    return last


def _is_specifier(name: str) -> bool:
    return name in _NO_NAMES or (name.startswith("__") and name.endswith("__"))


def _template_names(heads: str) -> tuple[str, ...] | None:
    if not heads.strip():
        return None
    inner = heads.strip().removeprefix("template").strip()[1:].rstrip()
    names = []
    for part in split(inner[: inner.rindex(">")]):
        words = re.findall(r"\w+", part.partition("=")[0])
        names += words[-1:]
    return tuple(names)


def split(text: str) -> list[str]:
    """The parts of a text between commas outside of brackets; empty parts are left out.

    Each `<` and `>` outside of other brackets counts as a bracket, so `a < b, c` is one part.
    """
    parts, depth, inside = [""], 0, 0
    for sign in text:
        inside += (sign in "([{") - (sign in ")]}")
        depth += 0 if inside else (sign == "<") - (sign == ">")
        if sign == "," and not depth and not inside:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts if part.strip()]
