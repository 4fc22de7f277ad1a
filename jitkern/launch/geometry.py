"""A compiled kernel, and the geometry of its launches: how threads are spread over a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple  # quicker to create than jitkern.named_tuple's

import torch

from jitkern import launch
from jitkern.errors import LaunchError
from jitkern.source.kinds import Variant

if TYPE_CHECKING:
    from jitkern.launch.packing import ArgumentPacker

MAX_THREADS = 1024  # in a block, on every GPU


class Compiled(NamedTuple):
    """A variant as launches need it: the loaded function, and which arguments it takes.

    reference: that of the variant's key. kept: positions of the arguments that the compiled kernel
    takes (None: all). For launches from Python, what: its name in messages; packs: what packs its
    arguments, if no more has to be checked.
    """

    variant: Variant
    function: Any
    meta: dict[str, Any]
    reference: str
    kept: tuple[int, ...] | None = None
    what: str = ""
    packs: ArgumentPacker | None = None

    @property
    def parameters(self) -> list[str]:
        """The codes of its parameters, e.g. `*f32`, `i64`."""
        codes: list[str] = self.meta["parameters"]
        return codes

    def written(self) -> tuple[Sequence[int], list[str]]:
        """Return its parameters as their author wrote them: see `parameters.written`."""
        return launch.parameters.written(self.variant, self.kept, len(self.parameters))


class Geometry(NamedTuple):
    """The geometry of a launch: how its threads are spread over a GPU."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem: int
    cluster: tuple[int, int, int] | None = None
    cooperative: bool = False
    pdl: bool = False
    carveout: int | None = None


def geometry_of(what: str, compiled: Compiled, keywords: dict[str, Any]) -> Geometry:
    """Return the geometry from keywords and Triton's metadata. Raises LaunchError."""
    meta = compiled.meta
    grid = _three_sizes(what, "grid", keywords.get("grid"), meta.get("grid_limit", 2**31))
    cluster = _three_sizes(what, "cluster", keywords["cluster"]) if "cluster" in keywords else None
    if compiled.variant.source.in_python:
        block, smem = (meta["block"], 1, 1), meta["smem"]
        if meta["cluster"] > 1:
            cluster = (meta["cluster"], 1, 1)
            grid = (grid[0] * meta["cluster"], grid[1], grid[2])
    else:
        block, smem = _three_sizes(what, "block", keywords.get("block")), keywords.get("smem", 0)
        _check_block(what, block, keywords["block"])
    return Geometry(
        grid,
        block,
        smem,
        cluster,
        bool(keywords.get("cooperative", False) or meta.get("cooperative", False)),
        bool(keywords.get("pdl", False) or meta.get("pdl", False)),
        _percent(what, keywords["carveout"]) if "carveout" in keywords else None,
    )


def _percent(what: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 100:
        raise LaunchError(
            f"{what}: `carveout` must be the share of shared memory in percent, a whole number "
            f"from 0 (as much L1 cache as possible) to 100, got {value!r}"
        )
    return value


def _check_block(what: str, block: tuple[int, int, int], keyword: Any) -> None:
    if all(type(size) is int for size in block) and math.prod(block) > MAX_THREADS:
        raise LaunchError(
            f"{what}: block={keyword} has {math.prod(block)} threads, and no GPU takes more than "
            f"{MAX_THREADS} in a block: use a smaller block, and a larger grid"
        )


def plain_geometry(keywords: dict[str, Any]) -> Geometry | None:
    """Return the geometry of a plain launch in one dimension, or None for any other launch."""
    grid, block = keywords.get("grid"), keywords.get("block")
    if len(keywords) > 2 or type(grid) is not int or type(block) is not int:
        return None
    if not (0 <= grid < 2**31 and 0 <= block < 2**31):
        return None
    return Geometry((grid, 1, 1), (block, 1, 1), 0)


def _three_sizes(what: str, name: str, value: Any, limit: int = 2**31) -> tuple[int, int, int]:
    sizes = (
        (value,)
        if isinstance(value, int)
        else tuple(value)
        if isinstance(value, (tuple, list, torch.Size))
        else ()
    )
    if not 1 <= len(sizes) <= 3 or not all(
        isinstance(size, int) and 0 <= size < limit for size in sizes
    ):
        remedy = (
            f": pass {name}=" if value is None
            else ": divide with //, for whole sizes" if isinstance(value, float)
            else f": launch several times, each with sizes below {limit}"
            if any(isinstance(size, int) and size >= limit for size in sizes)
            else ""
        )  # fmt: skip
        raise LaunchError(f"{what}: `{name}` must be one to three sizes, got {value!r}{remedy}")
    return (*sizes, 1, 1)[:3]
