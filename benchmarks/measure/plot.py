"""A picture of a report: GB/s over the size of a block, one panel a lane.

Run by the peers' Python, which has matplotlib: ``python -m measure.plot results.json throughput.png``. It decides looks
and must never know how figures came about; it reads the report's JSON and imports nothing else of the benchmark.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import sys
from typing import Any

COLOURS = {
    "kvxfer": "#1b6ca8",
    "NIXL": "#76b041",
    "NIXL tcp": "#76b041",
    "NIXL tuned": "#3f6f1f",
    "Mooncake tcp": "#d1495b",
}
LIMIT_COLOUR = "#8a8a8a"
COPYING = ("mapped", "cma")
"""Lanes that others are compared with by one copying thread."""
PANELS_A_ROW = 3


def panels(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each panel, in the report's order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        is_usual = row["via"] == "post" and row["lists"] == "prepared" and row["at_once"] == 1
        is_one_thread = row["lane"] not in COPYING or row["copy_threads"] == 1  # as what stands beside it
        if not is_usual or not is_one_thread or row["error"]:
            continue
        where = "" if row["site"] == "one host" else f", {row['site']}"
        found.setdefault(f"{row['lane']} {row['op'].upper()}, {row['pages']} pages{where}", []).append(row)
    return {title: panel for title, panel in found.items() if len(panel) > 2}


def lines(panel: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """(size, GB/s) of each contender."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in panel:
        found.setdefault("kvxfer", []).append((row["block_bytes"], row["gb_s"]["median"]))
        for other in row["others"]:
            if not other["error"]:
                found.setdefault(other["name"], []).append((row["block_bytes"], other["gb_s"]["median"]))
    return found


def draw(report: dict[str, Any], picture: pathlib.Path) -> None:
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    shown = panels(report["rows"])
    rows = max(1, -(-len(shown) // PANELS_A_ROW))
    figure, axes = pyplot.subplots(rows, PANELS_A_ROW, figsize=(13, 3.6 * rows), squeeze=False)
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis, (title, panel) in zip(axes.flat, shown.items(), strict=False):
        sizes = [row["block_bytes"] for row in panel]
        for name, points in lines(panel).items():
            colour = COLOURS.get(name, LIMIT_COLOUR)
            style = {"linestyle": "--"} if name not in COLOURS else {"marker": "o", "markersize": 4}
            axis.plot(*zip(*points, strict=True), label=name, color=colour, **style)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [f"{s >> 20}M" if s >= 1 << 20 else f"{s >> 10}K" for s in sizes])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8, frameon=False)
    for axis in axes[:, 0]:
        axis.set_ylabel("GB/s")
    machine = report["machine"]
    title = f"{machine['cpu']}, {machine['cores']} cores, commit {report['commit']}, by size of a block"
    figure.suptitle(title, fontsize=9)
    figure.tight_layout(rect=(0.0, 0.0, 1.0, 1.0 - 0.3 / (3.6 * rows)))  # room for the title
    figure.savefig(picture, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    draw(json.loads(pathlib.Path(sys.argv[1]).read_text()), pathlib.Path(sys.argv[2]))
