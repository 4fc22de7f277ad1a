"""Recording: the calls that had to be readied in a run, kept as samples for `prewarm --from`.

One line of JSON each, appended whole, so that several processes may share a file; one that a full
disk or the end of its process cut off is begun anew. Tensors are kept as dtype, shape, strides and
alignment; their content is not.
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
from jitkern.errors import DeclarationError
from jitkern.named_tuple import NamedTuple

SCHEMA = 1
ALIGNMENT = 16  # bytes: what kernels ask of an address
MOST = 64  # calls of an op that differ in sizes and numbers alone, and need the same kernels
ENOUGH = 16 * MOST  # of them left out in a row, after which kernels are not asked for any more
MAX_LINE = 1 << 24
_log = logging.getLogger(__name__)
_BEGINNING = f'{{"schema":{SCHEMA},'.encode()
_seen: set[str] = set()
_alike: Counter[tuple[Any, ...]] = Counter()
_left_out: Counter[tuple[Any, ...]] = Counter()  # by outline, since one needed a new kernel


class Call(NamedTuple):
    """One call: the op, the module that declares it, device type and kind of source.

    args: with meta tensors for tensors. line: where in its file.
    """

    op: str
    module: str
    device: str
    kind: str
    args: tuple[Any, ...]
    line: int = 0


def note(
    op: str,
    module: str,
    device: str,
    kind: str,
    args: Sequence[Any],
    kernels: Callable[[tuple[Any, ...]], str] = lambda _: "",
) -> None:
    """Append a call to the file of the settings, once. Raises nothing.

    kernels: what tells, from the arguments with meta tensors for tensors, which kernels it needs.
    Of calls that differ in sizes and numbers alone, MOST are kept that need the same kernels; and
    once ENOUGH were left out in a row, with none that needs others, the rest is left out unasked.
    """
    path = config.current().record
    if path is None:
        return
    outline = (op, device, kind, *map(_outline, args))
    if _left_out[outline] >= ENOUGH:
        return
    try:
        encoded = [_encoded(arg) for arg in args]
    except TypeError as e:
        _log.warning("a call of %s is not recorded: %s", op, e)
        return
    fields = {"op": op, "module": module, "device": device, "kind": kind, "args": encoded}
    line = json.dumps({"schema": SCHEMA, **fields}, separators=(",", ":"))
    if line in _seen:
        return
    alike = (*outline, kernels(tuple(_decoded(encoded))))
    _alike[alike] += 1
    if _alike[alike] > MOST:
        _seen.add(line)  # so that a call that comes again is left out once
        _left_out[outline] += 1
        if _left_out[outline] == ENOUGH:
            _log.warning(
                "%s: %d calls were left out so; from now on those that differ in sizes and numbers "
                "alone are, whatever kernels they need", op, ENOUGH,
            )  # fmt: skip
        if _alike[alike] == MOST + 1:
            _log.warning(
                "%s: %d calls that differ in sizes and numbers alone, and need the same kernels, "
                "are recorded; further ones are not", op, MOST,
            )  # fmt: skip
        return
    _left_out[outline] = 0
    _seen.add(line)
    try:
        _append(path, line.encode() + b"\n")
    except OSError as e:
        _log.warning("a call of %s could not be recorded in %s: %s", op, path, e)


def _append(path: Path, line: bytes) -> None:
    """Append a line to a file, which may end in one that was cut off. Raises OSError."""
    if len(line) > MAX_LINE:
        raise OSError(errno.EFBIG, f"it takes more than {MAX_LINE >> 20} MiB")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        whole = b"\n" * _is_cut_off(path) + line
        if os.write(descriptor, whole) < len(whole):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


def _is_cut_off(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:  # empty, or a pipe
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
    return False


def read(path: Path) -> list[Call]:
    """The calls in a file, each once. Raises DeclarationError for one that is none, OSError."""
    calls = {}
    with path.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE), b""), 1):
            try:
                calls[line] = _decoded_call(json.loads(line))._replace(line=number)
            except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as e:
                if isinstance(e, json.JSONDecodeError) and _is_begun(line):
                    _log.warning("%s, line %d was cut off, and is left out", path, number)
                    continue
                raise DeclarationError(
                    f"{path}, line {number} is not a recorded call: {e!r:.200}"
                ) from e
    return list(calls.values())


def _is_begun(line: bytes) -> bool:
    """Whether it begins as a call does, as far as it goes."""
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
    raise TypeError(f"an argument is a {type(value).__name__}")


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        shape, stride, offset = value["shape"], value["stride"], value["offset"]
        dtype = _dtype(value["tensor"])
        whole = 1 + sum((n - 1) * s for n, s in zip(shape, stride)) if 0 not in shape else 0
        memory = torch.empty(whole + offset, dtype=dtype, device="meta")
        return memory.as_strided(shape, stride, offset)
    ((kind, text),) = value.items()
    if kind == "float":
        return float(text)
    return torch.device(text) if kind == "device" else _dtype(text)


def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"`{text}` is no dtype")
    return dtype


def _decoded_call(fields: dict[str, Any]) -> Call:
    if fields["schema"] != SCHEMA:
        raise ValueError(f"it has schema {fields['schema']}, and this jitkern reads {SCHEMA}")
    op, module, device, kind = (fields[name] for name in ("op", "module", "device", "kind"))
    if not all(isinstance(text, str) for text in (op, module, device, kind)):
        raise ValueError("a name in it is no text")
    return Call(op, module, device, kind, tuple(_decoded(fields["args"])))


def _outline(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim()
    if isinstance(value, (tuple, list)):
        return tuple(map(_outline, value))
    return type(value).__name__ if isinstance(value, (int, float)) else repr(value)
