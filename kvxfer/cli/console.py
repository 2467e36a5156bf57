"""What a person sees: aligned tables, a list of processes becoming ready, progress bars.

Decides looks only. On a terminal lines are redrawn in place; elsewhere each event is one plain line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO

BAR_WIDTH = 28


def size(byte_count: float) -> str:
    """Bytes for people: ``46 KB``, ``1.5 MB`` (powers of 1000, as on the wire)."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if byte_count >= scale:
            return f"{byte_count / scale:.{0 if byte_count >= 100 * scale else 1}f} {unit}"
    return f"{byte_count:.0f} B"


def duration(seconds: float) -> str:
    """Seconds for people: ``812 us``, ``61.5 ms``, ``2.03 s``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1.0:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s"


def table(rows: Sequence[Sequence[str]], *, indent: str = "  ") -> str:
    """Rows as aligned columns; the last column is not padded."""
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(max(map(len, rows)))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append(indent + "  ".join(cells).rstrip())
    return "\n".join(lines)


class Checklist:
    """Named things that become ready, one line each. ``set`` changes a line; on a terminal it is redrawn in place."""

    def __init__(self, names: Sequence[str], stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._is_terminal = self._stream.isatty()
        self._width = max(map(len, names))
        self._states = dict.fromkeys(names, "starting ...")
        if self._is_terminal:
            for name in names:
                print(self._line(name), file=self._stream, flush=True)

    def _line(self, name: str) -> str:
        return f"  {name.ljust(self._width)}  {self._states[name]}"

    def set(self, name: str, state: str) -> None:
        self._states[name] = state
        if not self._is_terminal:
            print(self._line(name), file=self._stream, flush=True)
            return
        up = len(self._states) - list(self._states).index(name)
        print(f"\x1b[{up}A\r{self._line(name)}\x1b[K\x1b[{up}B\r", end="", file=self._stream, flush=True)


class ProgressBar:
    """Callable ``(stage, done, total, note)``: a bar per stage on a terminal, a line per stage and 25 % elsewhere.

    ``of`` says on each line what it is that progresses; ``note`` is more about it, at the end of the line.
    """

    def __init__(self, stream: TextIO | None = None, *, of: str = "") -> None:
        self._of = f"{of}: " if of else ""
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._stage = ""
        self._quarter = -1
        self._drawn_s = 0.0

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        is_new = stage != self._stage
        if is_new:
            self.close()
            self._stage, self._quarter = stage, -1
        share = min(1.0, done / total) if total > 0 else 0.0
        if not self._is_terminal:
            quarter = int(share * 4)
            if is_new or quarter > self._quarter:
                self._quarter = quarter
                text = f"  {self._of}{stage}" + (f": {share:.0%}" if total > 0 else "") + (f"  {note}" if note else "")
                print(text, file=self._stream, flush=True)
            return
        now_s = time.monotonic()
        if is_new or share >= 1.0 or now_s - self._drawn_s > 0.1:
            self._drawn_s = now_s
            filled = round(share * BAR_WIDTH)
            bar = "#" * filled + "." * (BAR_WIDTH - filled)
            more = f"  {note}" if note else ""
            print(f"\r  {self._of}{stage} [{bar}] {share:4.0%}{more}\x1b[K", end="", file=self._stream, flush=True)

    def close(self) -> None:
        """End the bar that is being drawn, if any."""
        if self._stage and self._is_terminal:
            print(file=self._stream, flush=True)
        self._stage = ""
