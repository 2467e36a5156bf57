"""The owner of an incarnation's two registered regions: one that peers read (``OUT``), one that they may fill (``IN``).
It overwrites what it offers when it likes, and removes a region and registers the same bytes under another id; must
never tell a peer.
"""

from __future__ import annotations

from kvxfer.testing.sim.tagged_memory import BLOCK_BYTES, Cell
from kvxfer.testing.sim.view import ProcessView
from kvxfer.testing.sim.virtual_clock import MS

REGION_CELLS = 48
OUT, IN = 0, 1
_FIRST_ID = 100
_RETRY = 5 * MS


class RegionOwner:
    def __init__(self, process: ProcessView) -> None:
        self._process, self._world = process, process.world
        self._next_id = _FIRST_ID
        self.ids: list[int | None] = [None, None]
        """The region id of each area; ``None`` while it is not registered."""
        self._is_leaving = [False, False]
        self.free: set[int] = set()
        """Cells of the IN region that no write is to fill, as far as the world knows."""

    def begin(self) -> None:
        for area in (OUT, IN):
            self._register(area)

    def _register(self, area: int) -> None:
        process = self._process
        region, self._next_id = self._next_id, self._next_id + 1
        is_shareable = process.rng.random() < 0.7
        info = process.machines.RegionInfo(
            region, REGION_CELLS * BLOCK_BYTES, can_read=area == OUT, can_write=area == IN, is_shareable=is_shareable
        )
        process.endpoint.add_region(info)
        process.memory.expose(region, area)
        self._world.reference.registered(process.incarnation, region, process.clock.now)
        self.ids[area] = region
        if area == IN:
            self.free = set(range(REGION_CELLS))

    def overwrite(self) -> None:
        """What is offered to readers changes whenever its owner likes."""
        region = self.ids[OUT]
        if region is not None:
            self._process.memory.renew(Cell(region, self._process.rng.randrange(REGION_CELLS)))

    def leave(self, area: int) -> int | None:
        """Begin to remove an area's region, as often as it takes. Its id, where that begins now."""
        region = self.ids[area]
        if region is None or self._is_leaving[area]:
            return None
        self._is_leaving[area] = True
        self._remove(area)
        return region

    def _remove(self, area: int) -> None:
        process, region = self._process, self.ids[area]
        assert region is not None
        is_gone, effects = process.endpoint.remove_region(region, process.clock.now)
        if is_gone:
            # From this very moment on the bytes belong to another user.
            self._world.reference.removed(process.incarnation, region, process.clock.now)
            self.ids[area] = None
            self._is_leaving[area] = False
            painted = [process.memory.renew(Cell(region, index)) for index in range(REGION_CELLS)]
            process.later(process.rng.randrange(5 * MS, 300 * MS), self._return, area, region, painted)
        else:
            process.later(process.rng.randrange(_RETRY, 4 * _RETRY), self._remove, area)
        self._world.log(f"{process!r} removes region {region}: {'gone' if is_gone else 'busy'}")
        process.perform(effects)

    def _return(self, area: int, region: int, painted: list[bytes]) -> None:
        """No write reached it meanwhile; then it is registered again."""
        process = self._process
        for index, expected in enumerate(painted):
            found = process.memory.read(Cell(region, index))
            self._world.checkers.reused(process.incarnation, index, expected, found)
        self._register(area)
