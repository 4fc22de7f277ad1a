"""Recordings: the calls that needed a kernel in a run, kept as samples for `prewarm --from`.

Each call is one line of JSON, appended whole, so that several processes may share a file. A line
that a full disk or the end of its process cut off is left out. Tensors are kept as dtype, shape,
strides and alignment, without their content.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from jitkern import config
from jitkern.calls.signature import class_of, fixed_of
from jitkern.errors import DeclarationError
from jitkern.named_tuple import NamedTuple

SCHEMA = 1
ALIGNMENT = 16  # bytes: what kernels ask of an address
MOST = 64  # calls of an op that differ in sizes and numbers alone, and need the same kernels
ENOUGH = 16 * MOST  # calls skipped in a row, after which no call is asked for its kernels any more
MAX_LINE = 1 << 24
MAX_DIMS = 64  # of a tensor: Torch's own limit for most functions
_DIGITS = 20  # of a number: enough for 64 bits
_TENSOR = {"tensor", "shape", "stride", "offset"}
_log = logging.getLogger(__name__)
_BEGINNING = f'{{"schema":{SCHEMA},'.encode()
_seen: dict[Path, set[str]] = {}
_alike: Counter[tuple[Any, ...]] = Counter()
_skipped: Counter[tuple[Any, ...]] = Counter()  # by class, since a call last needed a new kernel


class RecordedCall(NamedTuple):
    """A recorded call: the op, the module that declares the op, device type and kind of source.

    args: the arguments, with meta tensors for tensors. gradient: whether a gradient was recorded.
    line: the number of its line in the file.
    """

    op: str
    module: str
    device: str
    kind: str
    args: tuple[Any, ...]
    gradient: bool = False
    line: int = 0


def note(
    op: str,
    module: str,
    device: str,
    kind: str,
    args: Sequence[Any],
    kernels: Callable[[tuple[Any, ...]], str] = lambda _: "",
    *,
    gradient: bool = False,
) -> None:
    """Append a call to the file that the settings name, once. Raises nothing.

    kernels: returns a text that is equal for calls that need the same kernels, given the arguments
    with meta tensors for tensors.
    gradient: whether a gradient is being recorded.
    Of calls that need the same kernels and differ in sizes and numbers alone, MOST are recorded.
    Once ENOUGH such calls were skipped in a row, the rest is skipped without calling `kernels`.
    """
    path = config.current().record
    if path is None:
        return
    call_class = (op, device, kind, *class_of(args), fixed_of(args))
    if _skipped[call_class] >= ENOUGH:
        return
    try:
        encoded = [_encoded(arg) for arg in args]
    except TypeError as e:
        _log.warning("cannot record a call of %s: %s", op, e)
        return
    line = _line(op, module, device, kind, encoded, gradient=gradient)
    if path not in _seen:
        _seen[path] = _lines_of(path)
    seen = _seen[path]
    if line in seen:
        return
    alike = (*call_class, kernels(tuple(_decoded(encoded))))
    _alike[alike] += 1
    if _alike[alike] > MOST:
        seen.add(line)  # so that a repeated call counts as skipped once
        _skipped[call_class] += 1
        if _skipped[call_class] == ENOUGH:
            _log.warning(
                "%s: skipped %d near-duplicate calls; further calls that differ only in sizes and "
                "numbers will not be recorded", op, ENOUGH,
            )  # fmt: skip
        if _alike[alike] == MOST + 1:
            _log.warning(
                "%s: recorded %d calls that differ only in sizes and numbers and need the same "
                "kernels; skipping further ones", op, MOST,
            )  # fmt: skip
        return
    _skipped[call_class] = 0
    seen.add(line)
    try:
        append(path, line.encode() + b"\n")
    except OSError as e:
        _log.warning("cannot record a call of %s in %s: %s", op, path, e)


def _lines_of(path: Path) -> set[str]:
    """Return the lines of a file, without their ends; none if it is not a file."""
    try:
        text = path.read_text(errors="replace") if path.is_file() else ""
    except OSError:
        text = ""
    return {*text.splitlines()}


def line_of(op: str, module: str, device: str, kind: str, args: Sequence[Any]) -> str:
    """Return the line of a call. Raises TypeError for an argument that no recording can hold."""
    return _line(op, module, device, kind, [_encoded(arg) for arg in args])


def _line(
    op: str, module: str, device: str, kind: str, encoded: list[Any], *, gradient: bool = False
) -> str:
    fields = {"op": op, "module": module, "device": device, "kind": kind, "args": encoded}
    more = {"gradient": True} if gradient else {}
    return json.dumps({"schema": SCHEMA, **fields, **more}, separators=(",", ":"))


def append(path: Path, line: bytes) -> None:
    """Append a line and its end to a file whose last line may be cut off. Raises OSError."""
    if len(line) > MAX_LINE:
        raise OSError(errno.EFBIG, f"its line takes more than {MAX_LINE >> 20} MiB")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        data = b"\n" * _is_cut_off(path) + line
        if os.write(descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


def _is_cut_off(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:  # an empty file, or a pipe
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
    return False


def read(path: Path) -> list[RecordedCall]:
    """Return the calls in a file, each once. Raises DeclarationError for a bad line, OSError."""
    calls = {}
    with path.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE), b""), 1):
            try:
                calls[line] = parsed(line)._replace(line=number)
            except ValueError as e:
                if isinstance(e, json.JSONDecodeError) and _is_begun(line):
                    _log.warning("%s, line %d was cut off; leaving it out", path, number)
                    continue
                raise DeclarationError(
                    f"{path}, line {number} is not a recorded call: {e!s:.200}"
                ) from e
    return list(calls.values())


def parsed(line: bytes | str) -> RecordedCall:
    """Return the call in a line, which may come from anybody. Raises ValueError.

    Sizes allocate nothing, whatever they are; numbers, ranks and the forms of values are bounded.
    """
    try:
        return _decoded_call(json.loads(line, parse_int=_integer))
    except KeyError as e:
        raise ValueError(f'it has no "{e.args[0]}"') from e
    except (TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError) as e:
        raise ValueError(f"{e!r:.200}") from e


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"it has a number of {len(text)} digits")
    return int(text)


def _is_begun(line: bytes) -> bool:
    """Whether a line, which may have been cut off, begins as a recorded call does."""
    return line.startswith(_BEGINNING) or _BEGINNING.startswith(line.rstrip())


def _encoded(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {
            "tensor": str(value.dtype).removeprefix("torch."),
            "shape": [*value.shape],
            "stride": [*value.stride()],
            "offset": value.data_ptr() % ALIGNMENT // value.element_size(),
        }
    if isinstance(value, (torch.dtype, torch.device)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, (tuple, list)):
        return [_encoded(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"an argument is a {type(value).__name__}, which recordings cannot hold")


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        shape, stride, offset = value["shape"], value["stride"], value["offset"]
        numbers = (*shape, *stride, offset)
        if value.keys() != _TENSOR or len(shape) != len(stride) or len(shape) > MAX_DIMS:
            raise ValueError("it has a tensor of an unknown form")
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("it has a tensor whose sizes, strides or offset are no sizes")
        return meta_tensor(_dtype(value["tensor"]), shape, stride, offset)
    ((kind, text),) = value.items()
    if kind == "float":
        return float(text)
    return torch.device(text) if kind == "device" else _dtype(text)


def meta_tensor(
    dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """Return a meta tensor with these strides and storage offset, in elements."""
    span = 1 + sum((n - 1) * s for n, s in zip(shape, stride)) if 0 not in shape else 0
    memory = torch.empty(span + offset, dtype=dtype, device="meta")
    return memory.as_strided(shape, stride, offset)


def _dtype(text: str) -> torch.dtype:
    dtype = vars(torch).get(text)  # getattr() would import modules of Torch that have such a name
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"`{text}` is not a dtype of Torch")
    return dtype


def _decoded_call(fields: dict[str, Any]) -> RecordedCall:
    if fields["schema"] != SCHEMA:
        raise ValueError(f"its schema is {fields['schema']}, and this jitkern reads {SCHEMA}")
    op, module, device, kind = (fields[name] for name in ("op", "module", "device", "kind"))
    if not all(isinstance(text, str) for text in (op, module, device, kind)):
        raise ValueError("one of its names is not a string")
    if not isinstance(fields["args"], list):
        raise TypeError("its arguments are not a list")
    gradient = fields.get("gradient", False) is True
    return RecordedCall(op, module, device, kind, tuple(_decoded(fields["args"])), gradient)
