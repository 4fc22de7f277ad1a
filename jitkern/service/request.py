"""The request to build, as a client sends it. Anybody may send anything: all of it is bounded.

    {"schema":1,"call":"<a line of JITKERN_RECORD>","targets":[TARGET, …],"want":[DIGEST, …]}

A digest has 16 hex digits, as names of entries do, or all 64.

A call names an op, and describes its arguments. It holds no source, no flag and no path.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from jitkern.errors import TargetError
from jitkern.named_tuple import NamedTuple
from jitkern.target import Target

SCHEMA = 1
MAX_BYTES = 1 << 20
MAX_TARGETS = 8
MAX_WANTED = 1000
_LONGEST_TARGET = 200
_FIELDS = ("schema", "op", "module", "device", "kind", "args")  # of a recorded line, in its order
_NAME = re.compile(r"[\w:.]{1,200}", re.ASCII)
_TEXT = re.compile(r"[\w .,:+>*-]{0,256}", re.ASCII)  # of an argument: launch functions see it
_DIGEST = re.compile(r"[0-9a-f]{16}(?:[0-9a-f]{48})?")
_DIGITS = 20


class BuildRequest(NamedTuple):
    """A request.

    line: the call, as JITKERN_RECORD would have written it. targets: texts of targets, sorted.
    want: the digests of the entries that the client misses, the first 16 hex digits of each.
    """

    line: str
    op: str
    targets: tuple[str, ...]
    want: frozenset[str]

    @property
    def id(self) -> str:
        """The name of what is to be built: equal for clients that need the same."""
        return hashlib.sha256("\n".join((self.line, *self.targets)).encode()).hexdigest()


def parsed(body: bytes) -> BuildRequest:
    """Return the request in the body of a POST. Raises ValueError, TargetError."""
    try:
        fields = _loaded(body)
        schema, want = fields["schema"], fields.get("want", [])
        _check(schema == SCHEMA, f"its schema is {schema!r:.40}, and not {SCHEMA}")
        call = _loaded(fields["call"], "its call")
        line = {name: call[name] for name in _FIELDS if name in call}
        lacking = "".join([f'; it has no "{name}"' for name in _FIELDS if name not in call][:1])
        names = [line.get(name) for name in ("op", "device", "kind")]
        _check(
            not lacking
            and all(isinstance(name, str) and _NAME.fullmatch(name) for name in names)
            and _are_plain(line["args"]),
            f"its call is not a line of a recording{lacking}",
        )
        _check(
            _is_list(want, MAX_WANTED) and all(map(_DIGEST.fullmatch, want)),
            f"`want` is not a list of at most {MAX_WANTED} digests",
        )
        targets = _targets(fields["targets"])
    except KeyError as e:
        raise ValueError(f'it is not a request to build: it has no "{e.args[0]}"') from e
    except (TypeError, LookupError, AttributeError, RecursionError) as e:
        raise ValueError(f"it is not a request to build: {e!r:.200}") from e
    line["module"] = ""  # what the client says of it is not used
    text = json.dumps(line, separators=(",", ":"))
    return BuildRequest(text, line["op"], targets, frozenset(digest[:16] for digest in want))


def _loaded(text: bytes | str, what: str = "it") -> dict[str, Any]:
    try:
        value = json.loads(text, parse_int=_integer, parse_constant=_refuse)
    except json.JSONDecodeError as e:
        raise ValueError(f"{what} is not JSON: {e}") from e
    if not isinstance(value, dict):
        raise TypeError(f"{what} is not a JSON object")
    return value


def _integer(text: str) -> int:
    if len(text) > _DIGITS:  # its conversion would take time that grows with its square
        raise ValueError(f"it has a number of {len(text)} digits")
    return int(text)


def _refuse(text: str) -> None:
    raise ValueError(f"it has the number {text}")


def _check(good: object, problem: str) -> None:
    if not good:
        raise ValueError(problem)


def _is_list(value: Any, most: int) -> bool:
    return isinstance(value, list) and len(value) <= most


def _are_plain(value: Any) -> bool:
    """Return whether texts among the arguments hold nothing that a compiler could misunderstand."""
    if isinstance(value, list):
        return all(map(_are_plain, value))
    if isinstance(value, dict):
        return all(map(_are_plain, value.values()))
    return not isinstance(value, str) or _TEXT.fullmatch(value) is not None


def _targets(value: Any) -> tuple[str, ...]:
    _check(_is_list(value, MAX_TARGETS) and value, f"`targets` is not a list of 1 to {MAX_TARGETS}")
    for text in value:
        if len(text) > _LONGEST_TARGET:
            raise TargetError(f"`{text:.40}…` is too long for a target")
    return tuple(sorted({str(Target.parse(text)) for text in value}))
