"""The CUDA driver through ctypes: loading a cubin once for all devices, and launching it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import struct
import threading
from collections.abc import Iterator, Sequence
from ctypes import Structure, Union, c_byte, c_int, c_uint, c_uint64, c_void_p
from typing import Any

from jitkern._fork import after_fork
from jitkern.errors import LaunchError, LoadError
from jitkern.source.dtypes import TENSOR_MAP, table_of
from jitkern.source.kinds import DRIVER

_INVALID_CONTEXT = 201
_MAX_DYNAMIC_SHARED, _CARVEOUT, _NON_PORTABLE_CLUSTER = 8, 9, 14  # CUfunction_attribute
_DYNAMIC_SHARED = 16 << 10  # of 48 KB that need no asking; static shared memory may have the rest
_PORTABLE_CLUSTER = 8  # blocks
_RELAXED = 2  # CUstreamCaptureMode
_COOPERATIVE, _CLUSTER, _PDL = 2, 4, 6  # CUlaunchAttributeID


class _Value(Union):
    _fields_ = (("pad", c_byte * 64), ("cluster", c_uint * 3), ("flag", c_int))


class _Attribute(Structure):
    _fields_ = (("id", c_int), ("pad", c_byte * 4), ("value", _Value))


# CUlaunchConfig: grid, block, bytes of shared memory, stream, attributes and how many.
_CONFIG = struct.Struct("=7I4xQQI4x")
_CELLS = {  # each parameter in eight bytes of its own, but for tensor maps and tables
    "*": "Q", "bool": "?7x", "f32": "f4x", "f64": "d", "i8": "b7x", "i16": "h6x", "i32": "i4x",
    "i64": "q", "u8": "B7x", "u16": "H6x", "u32": "I4x", "u64": "Q", TENSOR_MAP: "128s",
}  # fmt: skip
_TENSOR_MAP_BYTES = 128  # also the alignment that the driver wants where it encodes
_lock = threading.Lock()  # held while a thread asks for a limit and raises the limit
after_fork(_lock)
_Room = tuple[ctypes.Array[c_uint64], ctypes.Array[c_void_p]]  # for values, and pointers to them


class CudaFunction:
    """A `__global__` function of a loaded cubin, with the `meta` and `reference` of its entry."""

    def __init__(self, cubin: bytes, meta: dict[str, Any], name: str, reference: str) -> None:
        self.reference = reference
        self.parameters: list[str] = meta["parameters"]
        self.meta = meta
        self.passed = [*self.parameters, *("*" for _ in meta.get("scratch", ()))]
        cells = [_cell(code) for code in self.passed]
        packed = struct.Struct("=" + "".join(cells))
        sizes = [struct.calcsize(f"={cell}") for cell in cells]
        self._offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self._pack = packed.pack_into
        self._cells, self._pointers = c_uint64 * (packed.size // 8), c_void_p * len(cells)
        self._rooms: list[_Room] = []
        self._name = name
        self._image = cubin  # the driver may read it lazily
        self._set: dict[tuple[int, int], int] = {}  # attributes, by the device and their number
        library, self._kernel = c_void_p(), c_void_p()
        driver = _driver()
        _check(
            driver.cuLibraryLoadData(ctypes.byref(library), cubin, None, None, 0, None, None, 0),
            f"loading {name}",
            LoadError,
        )
        symbol = meta["symbol"].encode()
        _check(
            driver.cuLibraryGetKernel(ctypes.byref(self._kernel), library, symbol),
            f"finding `{meta['symbol']}` in {name}",
            LoadError,
        )

    @property
    def address(self) -> int:
        """The CUkernel as programs take it; a CUkernel belongs to no context."""
        assert self._kernel.value
        return self._kernel.value

    def launch(
        self,
        values: Sequence[float | None],
        device: int,
        stream: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        smem: int,
        cluster: tuple[int, int, int] | None,
        cooperative: bool,  # noqa: FBT001
        pdl: bool,  # noqa: FBT001
        carveout: int | None = None,
    ) -> None:
        """Launch the function on `stream` of `device`; `values` match `parameters`.

        A grid with a 0 launches nothing. Raises LaunchError with the driver's reason and the launch
        configuration.
        """
        if 0 in grid:
            return
        if smem > _DYNAMIC_SHARED:
            self._allow_shared(smem, device)
        if cluster and math.prod(cluster) > _PORTABLE_CLUSTER:
            self._change(_NON_PORTABLE_CLUSTER, 1, device)
        if carveout is not None:
            self._change(_CARVEOUT, carveout, device)
        try:
            room = self._rooms.pop()
        except IndexError:  # all rooms are in use by other threads, or by a call around this one
            room = self._room()
        cells, pointers = room
        self._pack(cells, 0, *[0 if v is None else v for v in values])
        at = count = 0
        if cluster or cooperative or pdl:
            attributes = _attributes(cluster, cooperative=cooperative, pdl=pdl)
            at, count = ctypes.addressof(attributes), len(attributes)
        config = _CONFIG.pack(*grid, *block, smem, stream, at, count)
        driver = _driver()
        result = driver.cuLaunchKernelEx(config, self._kernel, pointers, None)
        if result == _INVALID_CONTEXT:  # a thread that has not used CUDA yet: nothing was launched
            _enter_primary_context(device)
            result = driver.cuLaunchKernelEx(config, self._kernel, pointers, None)
        if result:
            _check(
                result,
                f"launching {self._name} with grid={grid} block={block} smem={smem} "
                f"cluster={cluster or (0, 0, 0)}",
                LaunchError,
            )
        self._rooms.append(room)  # the driver has taken a copy

    def attribute(self, number: int, device: int) -> int:
        """Return an attribute of the kernel on `device`, by its number. Raises LaunchError."""
        value = c_int()
        _check(
            _driver().cuKernelGetAttribute(ctypes.byref(value), number, self._kernel, device),
            f"asking for attribute {number} of {self._name}",
            LaunchError,
        )
        return value.value

    def _room(self) -> _Room:
        cells = self._cells()
        first = ctypes.addressof(cells)
        return cells, self._pointers(*(first + offset for offset in self._offsets))

    def _allow_shared(self, smem: int, device: int) -> None:
        """Allow launches on `device` with this much dynamic shared memory. Raises LaunchError.

        The limit is never lowered: the launch runtime, and other threads, rely on the present one.
        """
        place = device, _MAX_DYNAMIC_SHARED
        if self._set.get(place, 0) >= smem:
            return
        with _lock:
            now = self.attribute(_MAX_DYNAMIC_SHARED, device)
            self._change(_MAX_DYNAMIC_SHARED, max(now, smem), device)

    def _change(self, number: int, value: int, device: int) -> None:
        """Set an attribute of the kernel on `device`, unless it is set. Raises LaunchError."""
        if self._set.get((device, number)) != value:
            result = _driver().cuKernelSetAttribute(number, value, self._kernel, device)
            what = {
                _MAX_DYNAMIC_SHARED: f"reserving {value} bytes of shared memory",
                _NON_PORTABLE_CLUSTER: f"allowing clusters of more than {_PORTABLE_CLUSTER} blocks",
                _CARVEOUT: f"setting the shared-memory carve-out to {value} %",
            }[number]
            _check(result, f"{what} for {self._name}", LaunchError)
            self._set[device, number] = value


class _Entry(Structure):
    _fields_ = (("name", ctypes.c_char_p), ("address", c_void_p))


def bind(library: ctypes.CDLL) -> None:
    """Give a library the functions of the driver that its DRIVER names. Raises LoadError."""
    driver, at = _driver(), ctypes.addressof(_Entry.in_dll(library, DRIVER))
    while name := (entry := _Entry.from_address(at)).name:
        entry.address = ctypes.cast(driver[name.decode()], c_void_p)
        at += ctypes.sizeof(_Entry)


@functools.cache
def device_attribute(number: int, device: int) -> int:
    """Return an attribute of a device, by its number in CUdevice_attribute. Raises LaunchError."""
    value = c_int()
    _check(
        _driver().cuDeviceGetAttribute(ctypes.byref(value), number, device),
        f"asking device {device} for its attribute {number}",
        LaunchError,
    )
    return value.value


def encoded_map(
    options: Sequence[int], address: int, sizes: Sequence[int], strides: Sequence[int],
    box: Sequence[int],
) -> bytes:  # fmt: skip
    """Return the bytes of a CUtensorMap; of each sequence, the innermost dimension comes first.

    options: the type of the elements, the rank, swizzle, promotion and fill, as the driver numbers
    them. strides: in bytes, without the innermost. Raises LaunchError.
    """
    kind, rank, swizzle, promotion, fill = options
    room = ctypes.create_string_buffer(2 * _TENSOR_MAP_BYTES)
    place = -(-ctypes.addressof(room) // _TENSOR_MAP_BYTES) * _TENSOR_MAP_BYTES
    _check(
        _driver().cuTensorMapEncodeTiled(
            c_void_p(place), kind, rank, c_void_p(address), (c_uint64 * 5)(*sizes),
            (c_uint64 * 5)(*strides), (c_uint * 5)(*box), (c_uint * 5)(*[1] * 5), 0, swizzle,
            promotion, fill,
        ),
        f"making a tensor map of sizes {tuple(sizes)}, strides {tuple(strides)} bytes and box "
        f"{tuple(box)}, innermost first",
        LaunchError,
    )  # fmt: skip
    return ctypes.string_at(place, _TENSOR_MAP_BYTES)


def capture_of(stream: int, device: int) -> int:
    """Return the number of the capture that a stream of `device` is part of; 0 if there is none.

    Raises LaunchError.
    """
    status, number = c_int(), c_uint64()
    arguments = (c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
    result = _driver().cuStreamGetCaptureInfo_v2(*arguments)
    if result == _INVALID_CONTEXT:  # a thread that has not used CUDA yet
        _enter_primary_context(device)
        result = _driver().cuStreamGetCaptureInfo_v2(*arguments)
    _check(result, "asking which graph is being captured", LaunchError)
    return number.value if status.value else 0


@contextlib.contextmanager
def outside_of_capture() -> Iterator[None]:
    """Let this thread allocate and wait, in the block, while a graph is being captured."""
    mode = c_int(_RELAXED)
    _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # the mode before


def _cell(code: str) -> str:
    """Return the format of a parameter, which takes a multiple of eight bytes."""
    table = table_of(code)
    return f"{table[2]}s" if table else _CELLS[code[:1] if code[:1] == "*" else code or "u64"]


def _attributes(
    cluster: tuple[int, int, int] | None, *, cooperative: bool, pdl: bool
) -> ctypes.Array[_Attribute]:
    chosen: list[_Attribute] = []
    if cluster:
        chosen.append(_Attribute(_CLUSTER, value=_Value(cluster=(c_uint * 3)(*cluster))))
    chosen += [
        _Attribute(name, value=_Value(flag=1))
        for name, flag in ((_COOPERATIVE, cooperative), (_PDL, pdl))
        if flag
    ]
    return (_Attribute * len(chosen))(*chosen)


def _enter_primary_context(device: int) -> None:
    context = c_void_p()
    _check(
        _driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        f"entering device {device}",
        LaunchError,
    )
    _check(_driver().cuCtxSetCurrent(context), f"entering device {device}", LaunchError)


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise LoadError(f"no CUDA driver: {e}") from e


def _check(result: int, doing: str, error: type[LoadError | LaunchError]) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise error(
            f"CUDA error {result} ({(text.value or b'unknown').decode()}) when {doing}", code=result
        )
