"""What was measured, as a table, as CSV and as plots, with the device, the commit and versions."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benches import common, plots
from benches.kernels import peers
from benches.kernels.bench import Bench, Row

RESULTS = Path(__file__).parent.parent / "results"
HEADER = (
    "op", "", "shape", "by", "kernel us", "wall us", "GB/s", "of copy", "of read", "first s", "",
)  # fmt: skip
COLORS = {
    peers.OURS: plots.OURS,
    f"{peers.OURS}-triton": "#4db6ac",
    f"{peers.OURS}-extension": "#aed581",
    "eager": plots.OTHERS,
    peers.STATIC: "#5c6bc0",
    peers.DYNAMIC: "#9fa8da",
    "liger": "#ef6c00",
    "quack": "#fbc02d",
    "flashinfer": "#8d6e63",
    "cupy": "#ec407a",
}


def cells(row: Row) -> tuple[str, ...]:
    """Return a row of the table."""
    return (
        row.op, row.direction, row.shape, row.who,
        _number(row.kernel_us, ".2f"), _number(row.wall_us, ".2f"), _number(row.gbs, ".4g"),
        _number(row.of_copy, ".1%"), _number(row.of_read, ".1%"), _number(row.first_call_s, ".2f"),
        row.note,
    )  # fmt: skip


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def file_stem(op: str, device: str) -> str:
    """Return the name of the files of an op on a device, e.g. `softmax_h200` or `softmax_cpu`."""
    model = device
    if device == "cuda":
        model = common.device_name(device).lower().replace("nvidia", "")
    return "_".join(re.sub(r"\W+", "-", part).strip("-") for part in (op, model))


def write(bench: Bench, folder: Path) -> list[Path]:
    """Write the CSV, and the plots as PNG and SVG if matplotlib is installed. Returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    device_name, commit = common.device_name(bench.device), common.commit()
    versions = common.versions()
    stem = folder / file_stem(bench.op, bench.device)
    table = stem.with_name(f"{stem.name}.csv")
    facts = {
        "copy_gbs": bench.ceilings.copy / 1e9,
        "read_gbs": bench.ceilings.read / 1e9,
        "device": device_name,
        "commit": commit,
        **versions,
    }
    rows = [{**asdict(row), **facts} for row in bench.rows]
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    facts_drawn = {"device": device_name, "commit": commit, "versions": versions}
    try:
        return [table, *draw(bench, stem, plots.caption_of(facts_drawn))]
    except ImportError as e:
        print(f'no plots: {e}; pip install "jitkern[docs]"', file=sys.stderr)
        return [table]


def draw(bench: Bench, stem: Path, caption: str) -> list[Path]:
    """Draw the rate of each contender at each shape, a panel for each direction, beside a copy.

    Without a cost there is no rate: then times are drawn. Raises ImportError without matplotlib.
    """
    plt = plots.pyplot()
    directions = list(dict.fromkeys(row.direction for row in bench.rows))
    shapes = {d: _shapes(bench, d) for d in directions}
    width = max(6.0, 1.5 + 2.2 * max(map(len, shapes.values())))
    figure, panels = plt.subplots(
        len(directions), figsize=(width, 3.4 * len(directions)), squeeze=False
    )
    for direction, axes in zip(directions, panels[:, 0]):
        rows = [row for row in bench.rows if row.direction == direction]
        _panel(axes, rows, shapes[direction], bench)
        axes.set_title(f"{bench.op} {direction}", loc="left")
    panels[-1, 0].set_xlabel(caption, color=plots.TEXT, fontsize=7)
    figure.tight_layout()
    paths = [stem.with_name(f"{stem.name}.svg"), stem.with_name(f"{stem.name}.png")]
    plots.save(figure, paths[0])
    figure.savefig(paths[1], dpi=150, facecolor="white", bbox_inches="tight")
    plt.close(figure)
    return paths


def _shapes(bench: Bench, direction: str) -> list[str]:
    return list(dict.fromkeys(row.shape for row in bench.rows if row.direction == direction))


def _panel(axes: Any, rows: Sequence[Row], shapes: Sequence[str], bench: Bench) -> None:
    """Draw bars, grouped by shape."""
    names = list(dict.fromkeys(row.who for row in rows))
    rated = any(row.gbs for row in rows)
    breadth = 0.8 / len(names)
    for number, name in enumerate(names):
        of = {row.shape: row for row in rows if row.who == name}
        heights = [_height(of.get(shape), rated=rated) for shape in shapes]
        places = [i - 0.4 + breadth * (number + 0.5) for i in range(len(shapes))]
        axes.bar(places, heights, breadth * 0.9, label=name, color=COLORS.get(name))
    if rated:
        for what, rate in bench.ceilings._asdict().items():
            dashes = "--" if what == "copy" else ":"
            label = f"{what}: {rate / 1e9:.0f} GB/s"
            axes.axhline(rate / 1e9, linestyle=dashes, color=plots.TEXT, linewidth=1, label=label)
    axes.set_ylabel("GB/s" if rated else "µs", color=plots.TEXT)
    axes.set_xticks(range(len(shapes)), [_wrapped(shape) for shape in shapes])
    axes.tick_params(colors=plots.TEXT, length=0)
    axes.legend(
        fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1), labelcolor=plots.TEXT
    )
    for spine in axes.spines.values():
        spine.set_visible(False)


def _height(row: Row | None, *, rated: bool) -> float:
    """Return the height of a bar; a contender without a time has none."""
    if row is None:
        return 0.0
    return (row.gbs if rated else row.kernel_us or row.wall_us) or 0.0


def _wrapped(name: str) -> str:
    """Return the name of a shape in two lines."""
    first, _, last = name.rpartition(" ")
    return f"{first}\n{last}" if first else last
