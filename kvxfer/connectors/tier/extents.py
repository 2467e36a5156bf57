"""Which units of a pool are free: blocks of several sizes share one pool of equal units. Hands out runs of neighbours
where it can, because copies of runs are faster, and several runs where it must. Pure; must never know a block."""

from __future__ import annotations

import bisect

import numpy as np
import numpy.typing as npt

from kvxfer.errors import InvalidArgumentError, StoreFullError

Units = npt.NDArray[np.uint32]


class FreeUnits:
    """The free units, as runs of neighbours."""

    def __init__(self, count: int) -> None:
        """``count`` units, all free. Raises InvalidArgumentError unless there is one."""
        if count < 1:
            raise InvalidArgumentError(f"a pool needs at least one unit, not {count}")
        self._count = count
        self._starts = [0]
        self._ends = {0: count}
        """End (exclusive) of the run that begins there."""
        self._free = count

    @property
    def free(self) -> int:
        return self._free

    @property
    def runs(self) -> int:
        """How many runs the free units are in."""
        return len(self._starts)

    def take(self, count: int) -> Units:
        """That many units, ascending within each run: the first run that is long enough, else the longest ones. Raises
        StoreFullError if there are fewer, InvalidArgumentError for less than one."""
        if count < 1:
            raise InvalidArgumentError(f"a block takes at least one unit, not {count}")
        if count > self._free:
            raise StoreFullError(f"{count} units are wanted, and {self._free} are free")
        for start in self._starts:
            if self._ends[start] - start >= count:
                return self._cut(start, count)
        taken: list[Units] = []
        by_length = sorted(self._starts, key=lambda start: start - self._ends[start])
        for start in by_length:
            part = min(count, self._ends[start] - start)
            taken.append(self._cut(start, part))
            count -= part
            if not count:
                break
        return np.concatenate(taken)

    def give(self, units: Units) -> None:
        """Those units are free again. Raises InvalidArgumentError for one that is free or is none of the pool's."""
        ordered = np.unique(units)
        if len(ordered) != len(units) or not len(units) or int(ordered[-1]) >= self._count:
            raise InvalidArgumentError("units are given back that are no units of this pool, or twice")
        edges = np.flatnonzero(np.diff(ordered) != 1) + 1
        for run in np.split(ordered, edges):
            self._join(int(run[0]), int(run[-1]) + 1)

    def _cut(self, start: int, count: int) -> Units:
        end = self._ends.pop(start)
        place = bisect.bisect_left(self._starts, start)
        if start + count == end:
            del self._starts[place]
        else:
            self._starts[place] = start + count
            self._ends[start + count] = end
        self._free -= count
        return np.arange(start, start + count, dtype=np.uint32)

    def _join(self, start: int, end: int) -> None:
        place = bisect.bisect_left(self._starts, start)
        before = self._starts[place - 1] if place else -1
        after = self._starts[place] if place < len(self._starts) else self._count + 1
        if end > after or (place and self._ends[before] > start):
            raise InvalidArgumentError(f"units {start} to {end - 1} are given back, and some of them are free")
        self._free += end - start
        if end == after:
            end = self._ends.pop(after)
            del self._starts[place]
        if place and self._ends[before] == start:
            self._ends[before] = end
            return
        self._starts.insert(place, start)
        self._ends[start] = end
