"""Where the elements of an extent lie: the slow, plain reading of what the native core's shells walk over."""

from __future__ import annotations

from typing import Any, NamedTuple


class Place(NamedTuple):
    """``length`` bytes at ``offset`` of region ``region``."""

    region: int
    offset: int
    length: int


def elements(rows: list[tuple[int, int, int, int, int]]) -> list[Place]:
    """Every element of some rows, in order."""
    return [
        Place(region, offset + i * stride, length)
        for region, offset, stride, length, count in rows
        for i in range(count)
    ]


def places(extent: Any) -> list[Place]:
    """The elements of an extent of ranges, in its order."""
    known = elements(extent.ranges.rows)
    return [known[i] for i in extent.blocks]
