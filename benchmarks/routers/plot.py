"""A picture of a run as SVG, written by hand, so that no library is needed. Decides looks only; it reads rows."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from routers.measures import FIGURES
from routers.tables import bar_text, figure_of

COLOURS = {"kvxfer": "#1b6ca8", "vllm-router": "#76b041", "sglang-router": "#e0a030", "smg": "#d1495b"}
OTHER = "#8a8a8a"
SHOWN = {(figure.measure, figure.name) for figure in FIGURES if figure.bar is not None or figure.limit is not None}
PANELS_A_ROW = 3
PANEL_WIDTH, NAME_WIDTH, VALUE_WIDTH = 330, 96, 56
LINE_HEIGHT, HEAD_HEIGHT, GAP = 22, 46, 18


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{html.escape(text)}</text>'


def _panel(row: dict[str, Any], left: float, top: float) -> list[str]:
    figure = figure_of(row)
    lines = [_text(left, top + 16, f"{row['dialect']}: {figure.title}", 'font-weight="bold"')]
    lines.append(_text(left, top + 32, f"bar: {bar_text(figure)}", 'fill="#666"'))
    widest = PANEL_WIDTH - NAME_WIDTH - VALUE_WIDTH
    largest = max(max(each["high"], each["median"]) for each in row["contenders"].values()) or 1.0
    for at, (name, each) in enumerate(row["contenders"].items()):
        y = top + HEAD_HEIGHT + at * LINE_HEIGHT
        wide, low, high = (max(0.0, each[key]) / largest * widest for key in ("median", "low", "high"))
        x, colour = left + NAME_WIDTH, COLOURS.get(name, OTHER)
        lines.append(_text(x - 6, y + 12, name, 'text-anchor="end"'))
        lines.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{LINE_HEIGHT - 6}" fill="{colour}"/>')
        middle = y + (LINE_HEIGHT - 6) / 2
        lines.append(f'<path d="M{x + low:.1f} {middle:.1f}H{x + high:.1f}" stroke="#222"/>')
        lines.append(_text(x + max(wide, high) + 5, y + 12, f"{each['median']:.{figure.digits}f}"))
    return lines


def svg(rows: Sequence[dict[str, Any]]) -> str:
    """Bars are medians, the line across each goes from quartile to quartile."""
    shown = [row for row in rows if (row["measure"], row["figure"]) in SHOWN]
    most = max((len(row["contenders"]) for row in shown), default=0)
    width = PANELS_A_ROW * (PANEL_WIDTH + GAP) + GAP
    step = HEAD_HEIGHT + most * LINE_HEIGHT + GAP
    height = GAP + -(-len(shown) // PANELS_A_ROW) * step
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for at, row in enumerate(shown):
        left = GAP + at % PANELS_A_ROW * (PANEL_WIDTH + GAP)
        lines += _panel(row, left, GAP / 2 + at // PANELS_A_ROW * step)
    return "\n".join([*lines, "</svg>", ""])
