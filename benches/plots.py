"""Bars of what a bench measured: each JSON file that a bench printed becomes an SVG beside it.

A file is the object that `--json` prints, in a file of its own; `title`, `unit` and `command` may
be added by hand. Bars of jitkern have a colour of their own. Needs `pip install jitkern[docs]`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MEASURED = {"us": "µs", "cold": "s", "warm": "s"}  # fields of the benches, and their units
OURS, OTHERS, TEXT = "#00897b", "#90a4ae", "#78909c"  # readable on white and on black
FACTOR = 30  # above it between the least and the most, the axis is logarithmic


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw every file named, and all files of folders named. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, help="JSON files, or folders of them")
    options = parser.parse_args(arguments)
    files = [f for p in options.paths for f in (sorted(p.glob("*.json")) if p.is_dir() else [p])]
    for file in files:
        output = json.loads(file.read_text())
        draw(output, file.with_suffix(".svg"))
        print(file.with_suffix(".svg"))
    return 0


def bars_of(output: dict[str, Any]) -> tuple[dict[str, float], str]:
    """Return the numbers of a bench by name, in its order, and their unit."""
    field = next(name for name in MEASURED if name in output)
    return output[field], output.get("unit", MEASURED[field])


def caption_of(output: dict[str, Any]) -> str:
    """Return what was measured on, in a line."""
    versions = ", ".join(f"{k} {v}" for k, v in output["versions"].items() if v != "none")
    return f"{output['device']}, commit {output['commit']}, {versions}"


def label_of(number: float, unit: str) -> str:
    """Return a number as a bar shows it, with two digits at least."""
    return f"{number:.1f} {unit}" if number >= 1 else f"{number:.2g} {unit}"


def draw(output: dict[str, Any], path: Path) -> None:
    """Write horizontal bars as SVG, with text as text; equal input gives equal bytes."""
    plt = pyplot()
    numbers, unit = bars_of(output)
    names = list(numbers)[::-1]
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.33 * len(names)))
    colors = [OURS if name.startswith("jitkern") else OTHERS for name in names]
    bars = axes.barh(names, [numbers[name] for name in names], color=colors, height=0.7)
    axes.bar_label(bars, [label_of(numbers[name], unit) for name in names], padding=4)
    if max(numbers.values()) > FACTOR * min(numbers.values()):
        axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_title(output.get("title", path.stem), loc="left")
    axes.set_xlabel(caption_of(output), color=TEXT, fontsize=8)
    axes.tick_params(colors=TEXT, length=0)
    axes.set_xticks([])
    axes.set_xticks([], minor=True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    save(figure, path)
    plt.close(figure)


def pyplot() -> Any:
    """Return `matplotlib.pyplot`, set up for files. Raises ImportError."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "jitkern", "text.color": TEXT})
    from matplotlib import pyplot as plt

    return plt


def save(figure: Any, path: Path) -> None:
    """Write a figure as SVG, without blanks at the ends of lines."""
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
    text = path.read_text()
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


if __name__ == "__main__":
    sys.exit(main())
