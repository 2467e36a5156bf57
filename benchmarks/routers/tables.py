"""The medians of a run, kvxfer's as ratios to the best peer's, and the table of both.

It decides how figures are shown and which bars are missed. It must never know how they were measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from routers.contenders import KVXFER
from routers.measures import FIGURES, Figure

Turn = dict[str, Any]
"""``dialect``, ``contender``, ``measure``, ``set``, ``turn`` and ``figures``."""


def spread(values: Sequence[float]) -> dict[str, Any]:
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    low, median, high = (round(value, 4) for value in quartiles)
    return {"median": median, "low": low, "high": high, "values": list(values)}


def rows(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """One for each dialect and figure that was measured: every contender's spread, and kvxfer's of the best peer's."""
    values: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for turn in turns:
        for name, value in turn["figures"].items():
            key = turn["dialect"], turn["measure"], name
            values.setdefault(key, {}).setdefault(turn["contender"], []).append(value)
    found = []
    for dialect in dict.fromkeys(turn["dialect"] for turn in turns):
        for figure in FIGURES:
            if (measured := values.get((dialect, figure.measure, figure.name))) is not None:
                found.append(_row(dialect, figure, {name: spread(each) for name, each in measured.items()}))
    return found


def _row(dialect: str, figure: Figure, measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    peers = {name: each["median"] for name, each in measured.items() if name != KVXFER}
    best = (max if figure.is_more_better else min)(peers, key=lambda name: peers[name]) if peers else None
    ours = measured.get(KVXFER)
    ratio = None
    if ours is not None and best is not None and peers[best] > 0:
        ratio = round(ours["median"] / peers[best], 3)
    row = {"dialect": dialect, "measure": figure.measure, "figure": figure.name, "title": figure.title}
    return {**row, "contenders": measured, "best_peer": best, "ratio": ratio, "is_held": _is_held(figure, ours, ratio)}


def _is_held(figure: Figure, ours: dict[str, Any] | None, ratio: float | None) -> bool | None:
    """``None`` where there is no bar, or nothing to compare."""
    if figure.limit is not None:
        return None if ours is None else ours["median"] <= figure.limit
    if figure.bar is None or ratio is None:
        return None
    return ratio >= figure.bar if figure.is_more_better else ratio <= figure.bar


def figure_of(row: dict[str, Any]) -> Figure:
    return next(each for each in FIGURES if (each.measure, each.name) == (row["measure"], row["figure"]))


def bar_text(figure: Figure) -> str:
    if figure.limit is not None:
        return f"at most {figure.limit:g}"
    if figure.bar is None:
        return ""
    goal = f", goal {figure.goal:g}" if figure.goal is not None else ""
    return f"{'at least' if figure.is_more_better else 'at most'} {figure.bar:g} of the best peer{goal}"


def _cell(figure: Figure, measured: dict[str, Any] | None) -> str:
    if measured is None:
        return ""
    low, median, high = (f"{measured[name]:.{figure.digits}f}" for name in ("low", "median", "high"))
    return median if low == high else f"{median} ({low} to {high})"


def markdown(found: Sequence[dict[str, Any]], titles: dict[str, str]) -> str:
    """One table a dialect; ``titles`` are the contenders' names in the order of the columns."""
    parts = []
    for dialect in dict.fromkeys(row["dialect"] for row in found):
        mine = [row for row in found if row["dialect"] == dialect]
        names = [name for name in titles if any(name in row["contenders"] for row in mine)]
        head = [f"`--dialect {dialect}`", *(titles[name] for name in names), "kvxfer / best peer", "bar"]
        lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        for row in mine:
            figure = figure_of(row)
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
            cells = [figure.title, *(_cell(figure, row["contenders"].get(name)) for name in names)]
            cells += [f"**{ratio}**" if ratio and row["is_held"] is False else ratio, bar_text(figure)]
            lines.append("| " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def misses(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    for row in found:
        if row["is_held"] is False:
            figure, ours = figure_of(row), row["contenders"][KVXFER]["median"]
            of = "" if row["ratio"] is None else f", {row['ratio']:.2f} of {row['best_peer']}'s"
            yield f"{row['dialect']}: {figure.title}: {ours:.{figure.digits}f}{of}; the bar is {bar_text(figure)}"
