"""Two endpoints with registered memory of real bytes; does what a shell would do with them, at once and in order."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kvxfer._native import _core
from kvxfer.testing.sim.elements import places
from kvxfer.testing.sim.virtual_clock import S
from tests.support.machines.endpoint_pair import Pair

MEMORY = _core.Lane.MEMORY
Rows = Iterable[tuple[int, int, int, int, int]]


def ranges(rows: Rows) -> Any:
    """``_core.Ranges`` of (region, offset, stride, length, count) rows."""
    return _core.Ranges(np.array(list(rows), dtype=np.uint64).reshape(-1, 5))


class RegionPair(Pair):
    """``memory[name][region]`` are the bytes of each side. :meth:`run` lets everything happen that can."""

    def __init__(self, limits: Any = None) -> None:
        super().__init__(limits)
        self.memory: dict[str, dict[int, bytearray]] = {"a": {}, "b": {}}
        self.corrupts: Callable[[bytes], bytes] = lambda data: data
        """What happens to each payload or read on its way."""
        self.mapped: set[tuple[str, int, int, Any]] = set()
        self.unmappable: set[Any] = set()
        """Lanes whose memory the sources cannot make readable."""

    def add_region(self, name: str, region: int, data: bytes, **options: Any) -> None:
        self.memory[name][region] = bytearray(data)
        self.ends[name].add_region(_core.RegionInfo(region, len(data), **options))

    def remove_region(self, name: str, region: int) -> bool:
        is_gone, effects = self.ends[name].remove_region(region, self.now)
        self.do(name, effects)
        return bool(is_gone)

    def post(self, name: str, op: str, id_: bytes, local: Rows, remote: Rows, **options: Any) -> None:
        """``options``: lanes, deadline_s, notification, wants_checksums, local_ids, remote_ids (default: all)."""
        here, there = ranges(local), ranges(remote)
        act = getattr(self.ends[name], op)
        effects = act(
            id_,
            self.refs[self.other(name)],
            here,
            options.get("local_ids", list(range(here.count))),
            there,
            options.get("remote_ids", list(range(there.count))),
            options.get("lanes", [MEMORY]),
            self.now + options.get("deadline_s", 600) * S,
            7,
            self.now,
            options.get("notification"),
            options.get("wants_checksums", False),
        )
        self.do(name, effects)

    def bytes_of(self, name: str, extent: Any) -> list[bytes]:
        return [bytes(self.memory[name][p.region][p.offset : p.offset + p.length]) for p in places(extent)]

    def fill(self, name: str, extent: Any, data: bytes) -> None:
        at = 0
        for place in places(extent):
            self.memory[name][place.region][place.offset : place.offset + place.length] = data[at : at + place.length]
            at += place.length
        assert at == len(data)

    def do(self, name: str, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, _core.SendMap):
                self.send_map(name, effect)
            else:
                super().do(name, [effect])

    def send_map(self, name: str, effect: Any) -> None:
        """Once a session, and in its place among the frames."""
        said = (name, effect.session, effect.pool, effect.lane)
        if said not in self.mapped:
            self.mapped.add(said)
            size = 0 if effect.lane in self.unmappable else len(self.memory[name][effect.pool])
            self.wire.append((name, effect.session, _core.Map(effect.pool, size, 0, [], effect.lane)))

    def perform(self, name: str) -> bool:
        """Do what ``name``'s endpoint asked its shell for; whether there was anything."""
        end, other = self.ends[name], self.other(name)
        sends, reads = self.take(name, _core.SendData), self.take(name, _core.ReadBlocks)
        for effect in sends:
            if (name, effect.session) not in self.peer_session:
                continue
            parts = self.bytes_of(name, effect.source)
            checksums = (
                [zlib.crc32(part) for part in parts] if effect.frame.has_checksums else []
            )  # any sum serves here
            _, theirs = self.peer_session[name, effect.session]
            landing = self.ends[other].data_arrives(theirs, effect.frame, self.now)
            frame = effect.frame
            if landing.token:
                self.arrive(other, frame.id, landing.token, landing.to, parts, checksums)
            self.do(name, end.data_sent(effect.session, frame.id, frame.attempt, len(parts), self.now))
        for effect in reads:
            if effect.lane in self.unmappable:
                stopped = end.read_stopped(effect.id, effect.token, _core.Code.no_lane, "no map", self.now)
                self.do(name, stopped)
            else:
                self.arrive(
                    name, effect.id, effect.token, effect.to, self.bytes_of(other, effect.source), effect.checksums
                )
        return bool(sends or reads)

    def arrive(self, name: str, id_: bytes, token: int, to: Any, parts: list[bytes], checksums: list[int]) -> None:
        end = self.ends[name]
        data = self.corrupts(b"".join(parts))
        at = 0
        for part, expected in zip(parts, checksums, strict=False):
            if zlib.crc32(data[at : at + len(part)]) != expected:
                self.do(name, end.read_stopped(id_, token, _core.Code.checksum, "checksum", self.now))
                return
            at += len(part)
        if end.is_landing(id_, token):
            self.fill(name, to, data)
        self.do(name, end.read_landed(id_, token, self.now))

    def run(self) -> None:
        """Until nothing is under way."""
        for _ in range(10_000):
            self.pump()
            if not any([self.perform(name) for name in "ab"]) and not self.wire:
                return
        raise AssertionError("it never comes to rest")

    def finals(self, name: str) -> list[tuple[str, str]]:
        return [(e.state.name, e.code.name) for e in self.take(name, _core.TransferFinal)]
