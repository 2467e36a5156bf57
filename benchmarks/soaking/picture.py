"""A picture of a soak as SVG, written by hand: its faults above what clients and processes did. Decides looks only."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from soaking.judge import Soaked, SoakVerdict, failures
from soaking.plan import BEFALLS
from soaking.records import HappenedFault

WIDTH, LEFT, RIGHT = 1500, 130, 190
ROW, GAP, PANEL = 16, 34, 150
POINTS_MAX = 1200
COLOURS = ("#1b6ca8", "#d1495b", "#76b041", "#e0a030", "#7a5195", "#3a9e9e", "#8a8a8a", "#b5651d", "#e377c2", "#444444")
OTHER = "#888888"
KIND_COLOURS = dict(zip(BEFALLS, COLOURS, strict=False))
OUTCOMES = {"right": "#76b041", "left": "#bbbbbb", "cut": "#e0a030", "failed": "#d1495b", "wrong": "#000000"}


class _Drawing:
    def __init__(self, span_s: float) -> None:
        self.lines: list[str] = []
        self.top = float(GAP)
        self._span_s = max(span_s, 1.0)

    def x(self, at_s: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(max(at_s / self._span_s, 0.0), 1.0)

    def text(self, x: float, y: float, text: str, more: str = "") -> None:
        self.lines.append(f'<text x="{x:.1f}" y="{y:.1f}" {more}>{html.escape(text)}</text>')

    def head(self, title: str) -> None:
        self.text(LEFT, self.top - 8, title, 'font-weight="bold"')

    def frame(self, height: float) -> None:
        wide = WIDTH - LEFT - RIGHT
        self.lines.append(
            f'<rect x="{LEFT}" y="{self.top:.1f}" width="{wide}" height="{height:.1f}" fill="none" stroke="#ccc"/>'
        )

    def box(self, from_s: float, until_s: float, y: float, height: float, colour: str, opacity: float) -> None:
        x = self.x(from_s)
        size = f'width="{max(self.x(until_s) - x, 1.5):.1f}" height="{height:.1f}"'
        self.lines.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{colour}" opacity="{opacity}"/>')

    def shade(self, faults: Sequence[HappenedFault], height: float) -> None:
        for fault in faults:
            self.box(fault.began_s, fault.ended_s, self.top, height, KIND_COLOURS.get(fault.kind, OTHER), 0.15)

    def legend(self, entries: Iterable[tuple[str, str]]) -> None:
        for number, (name, colour) in enumerate(entries):
            y = self.top + 10 + 14 * number
            self.lines.append(f'<rect x="{WIDTH - RIGHT + 8}" y="{y - 8:.1f}" width="9" height="9" fill="{colour}"/>')
            self.text(WIDTH - RIGHT + 22, y, name)

    def times(self) -> None:
        step = next(step for step in (10, 30, 60, 300, 600, 3600, 36000) if self._span_s / step <= 14)
        for at_s in range(0, int(self._span_s) + 1, step):
            label = f"{at_s} s" if step < 60 else f"{at_s // 60} min"
            self.text(self.x(at_s), self.top + 12, label, 'text-anchor="middle" fill="#666"')
        self.top += GAP + ROW


def svg(run: Soaked, verdicts: Sequence[SoakVerdict], title: str, blocks: Sequence[tuple[float, str, int]]) -> str:
    drawing = _Drawing(run.span_s)
    drawing.text(LEFT, 20, title, 'font-size="16" font-weight="bold"')
    drawing.top += 12
    for verdict in verdicts:
        mark, colour = ("met", "#3a7d1e") if verdict.is_met else ("NOT MET", "#d1495b")
        drawing.text(LEFT, drawing.top + 4, f"{verdict.rule}: {mark}. {verdict.sentence}"[:200], f'fill="{colour}"')
        drawing.top += ROW
    drawing.top += GAP
    _faults(drawing, run)
    _requests(drawing, run)
    _failures(drawing, run)
    for name, title_of in (
        ("memory_mb", "anonymous memory, MiB"),
        ("descriptors", "descriptors"),
        ("threads", "threads"),
    ):
        lines: dict[str, list[tuple[float, float] | None]] = {}
        for samples in run.processes:
            if samples.role != "etcd":
                line = lines.setdefault(samples.part, [])
                line += [*zip(samples.at_s, getattr(samples, name), strict=True), None]
        _curves(drawing, run, title_of, lines)
    used: dict[str, list[tuple[float, float] | None]] = {}
    for at_s, worker, count in blocks:
        used.setdefault(worker, []).append((at_s, count))
    _curves(drawing, run, "blocks in use", used)
    drawing.times()
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{drawing.top:.0f}" '
        f'font-family="sans-serif" font-size="12"><rect width="{WIDTH}" height="{drawing.top:.0f}" fill="#fff"/>'
    )
    return "\n".join([head, *drawing.lines, "</svg>", ""])


def _faults(drawing: _Drawing, run: Soaked) -> None:
    victims = sorted({fault.victim for fault in run.faults})
    drawing.head("faults (pale: until all parts saw each other again)")
    drawing.legend(KIND_COLOURS.items())
    for number, victim in enumerate(victims):
        drawing.text(LEFT - 6, drawing.top + ROW * number + 12, victim, 'text-anchor="end"')
    for fault in run.faults:
        y, colour = drawing.top + ROW * victims.index(fault.victim) + 2, KIND_COLOURS.get(fault.kind, OTHER)
        drawing.box(fault.began_s, fault.ended_s + (fault.whole_s or 0.0), y, ROW - 4, colour, 0.3)
        drawing.box(fault.began_s, fault.ended_s, y, ROW - 4, colour, 1.0)
    height = max(ROW * len(victims), 14.0 * len(KIND_COLOURS))
    drawing.frame(height)
    drawing.top += height
    drawing.times()


def _requests(drawing: _Drawing, run: Soaked) -> None:
    drawing.head("requests: seconds until their end, logarithmic from 0.01 to 100")
    drawing.shade(run.faults, PANEL)
    drawing.frame(PANEL)
    drawing.legend(OUTCOMES.items())
    for asked in sorted(run.asked, key=lambda asked: asked.outcome != "right"):
        share = (math.log10(min(max(asked.took_s, 0.01), 100.0)) + 2) / 4
        x, y = drawing.x(asked.at_s), drawing.top + PANEL * (1 - share)
        drawing.lines.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.6" fill="{OUTCOMES.get(asked.outcome, "#f0f")}"/>'
        )
    drawing.top += PANEL + GAP


def _failures(drawing: _Drawing, run: Soaked) -> None:
    failed = failures(run)
    names = sorted({attempt.name for _, attempt in failed}) or ["none"]
    drawing.head("attempts that failed, by name (hollow: before the first byte, asked again)")
    height = ROW * len(names)
    drawing.shade(run.faults, height)
    drawing.frame(height)
    for number, name in enumerate(names):
        drawing.text(LEFT - 6, drawing.top + ROW * number + 12, name, 'text-anchor="end" font-size="10"')
    for _, attempt in failed:
        x, y = drawing.x(attempt.ended_s), drawing.top + ROW * (names.index(attempt.name) + 0.5)
        fill = "#d1495b" if attempt.had_byte else "none"
        drawing.lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{fill}" stroke="#d1495b"/>')
    drawing.top += height + GAP


def _curves(drawing: _Drawing, run: Soaked, title: str, lines: dict[str, list[tuple[float, float] | None]]) -> None:
    """A None in a line: the process was started again."""
    most = max((point[1] for line in lines.values() for point in line if point), default=1.0) or 1.0
    drawing.head(f"{title}: 0 to {most:g}")
    drawing.shade(run.faults, PANEL)
    drawing.frame(PANEL)
    drawing.legend((name, COLOURS[number % len(COLOURS)]) for number, name in enumerate(lines))
    for number, line in enumerate(lines.values()):
        every = max(1, len(line) // POINTS_MAX)
        command, path = "M", []
        for at, point in enumerate(line):
            if point is None:
                command = "M"
            elif at % every == 0 or command == "M":
                path.append(f"{command}{drawing.x(point[0]):.1f} {drawing.top + PANEL * (1 - point[1] / most):.1f}")
                command = "L"
        colour, points = COLOURS[number % len(COLOURS)], "".join(path)
        drawing.lines.append(f'<path d="{points}" fill="none" stroke="{colour}"/>')
    drawing.top += PANEL + GAP
