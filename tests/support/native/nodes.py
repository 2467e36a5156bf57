"""Cores in this process: a node is one core with one pool; `join` makes two of them know each other."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import select
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest

from kvxfer._native import _core as native
from kvxfer.transport import ucx
from tests.support.limits import endpoint_limits

DIGEST = b"d" * 32
POISON = 0xEE
SECOND = 1_000_000_000
LANES = [native.Lane.MAPPED, native.Lane.STREAM]
UCX_LIBRARY = ucx.find_library()  # before the fixtures take KVXFER_* out of the environment
needs_ucx = pytest.mark.skipif(not UCX_LIBRARY.path, reason=ucx.missing(UCX_LIBRARY))
needs_cma = pytest.mark.skipif(native.cma_obstacle() != "", reason=f"here: {native.cma_obstacle()}")
NewId: TypeAlias = Callable[[], bytes]
_regions = itertools.count(100)


@dataclasses.dataclass
class Registered:
    """A registered region of one node: its id, and its bytes as an array."""

    id: int
    memory: Any

    def element(self, offset: int, length: int) -> bytes:
        return bytes(self.memory[offset : offset + length].tobytes())


class Node:
    """One core, one pool, and everything it ever told, in order."""

    def __init__(
        self,
        name: str,
        directory: pathlib.Path,
        *,
        block_bytes: int = 4096,
        blocks: int = 64,
        segments: list[tuple[int, int, int]] | None = None,
        region_bytes: int | None = None,
        is_shareable: bool = True,
        has_unix: bool = True,
        limits: native.EndpointLimits | None = None,
        digest: bytes = DIGEST,
        is_exposed: bool = False,
        has_checksums: bool = False,
        core: dict[str, Any] | None = None,
    ) -> None:
        """`core`: further arguments of its Core."""
        self.ref = native.AgentRef(name, 1, os.urandom(16))
        path = str(directory / name) if has_unix else ""
        self.core = native.Core(
            self.ref,
            limits or endpoint_limits(),
            bind_host="127.0.0.1",
            bind_port=0,
            unix_path=path,
            **(core or {}),
        )
        self.core.start()
        self.block_bytes, self.blocks = block_bytes, blocks
        self.segments = segments or [(0, block_bytes, block_bytes)]
        self.region = native.Region(region_bytes or block_bytes * blocks)
        self.memory = np.frombuffer(self.region, np.uint8)
        info = native.PoolInfo(7, blocks, block_bytes, digest, is_shareable, is_exposed, has_checksums)
        self.core.add_pool(info, self.region, self.segments)
        self.events: list[Any] = []

    def block(self, index: int) -> bytes:
        """The bytes of one block as they go over the wire: its segments in order."""
        parts = [self.memory[o + index * s : o + index * s + n] for o, s, n in self.segments]
        return b"".join(part.tobytes() for part in parts)

    def content(self, blocks: Any) -> list[bytes]:
        return [self.block(int(index)) for index in blocks]

    def fill_random(self, seed: int = 0) -> None:
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, self.memory.size, dtype=np.uint8)

    def fill(self, value: int) -> None:
        self.memory[:] = value

    def grant(
        self, transfer: bytes, blocks: Any, *, reader: str = "", ttl_s: float = 10.0, ready: int | None = None
    ) -> None:
        array = np.asarray(blocks, dtype=np.uint32)
        self.core.grant(transfer, 7, array, reader=reader, ttl_ns=int(ttl_s * SECOND))
        count = len(array) if ready is None else ready
        if count:
            self.core.ready(transfer, count, complete=count == len(array))

    def pull(
        self,
        transfer: bytes,
        source: Node | native.AgentRef,
        blocks: Any,
        *,
        lanes: Any = None,
        first: int = 0,
        deadline_s: float = 60.0,
    ) -> None:
        ref = source.ref if isinstance(source, Node) else source
        deadline = time.monotonic_ns() + int(deadline_s * SECOND)
        array = np.asarray(blocks, dtype=np.uint32)
        self.core.pull(transfer, ref, 7, array, first=first, lanes=lanes or LANES, deadline_ns=deadline)

    def pull_granted(self, source: Node, granted: Any, filled: Any, **options: Any) -> bytes:
        """Have ``source`` grant blocks, and pull them; returns the id of the transfer. ``options``: of :meth:`pull`."""
        transfer = os.urandom(16)
        source.grant(transfer, granted)
        self.pull(transfer, source, filled, **options)
        return transfer

    def register(self, nbytes: int, *, is_foreign: bool = False, **info: Any) -> Registered:
        """Memory of this node that peers may read and write; `info` is RegionInfo's."""
        region_id = next(_regions)
        if is_foreign:
            memory = np.zeros(nbytes, np.uint8)
            self.core.add_foreign_region(
                native.RegionInfo(region_id, nbytes, **info), memory.ctypes.data, nbytes, memory
            )
        else:
            region = native.Region(nbytes)
            memory = np.frombuffer(region, np.uint8)
            self.core.add_region(native.RegionInfo(region_id, nbytes, is_shareable=True, **info), region)
        return Registered(region_id, memory)

    def post(
        self,
        verb: str,
        transfer: bytes,
        peer: Node | native.AgentRef,
        local: Any,
        remote: Any,
        *,
        ids: tuple[Any, Any] | None = None,
        lanes: Any = None,
        deadline_s: float = 60.0,
        **options: Any,
    ) -> None:
        """`verb` is fetch or push; `local` and `remote` are rows (region, offset, stride, length, count)."""
        ours, theirs = (native.Ranges(np.array(rows, dtype=np.uint64).reshape(-1, 5)) for rows in (local, remote))
        chosen = ids or (np.arange(ours.count), np.arange(theirs.count))
        own_ids, peer_ids = (np.asarray(part, dtype=np.uint32) for part in chosen)
        prepared = getattr(self.core, f"prepare_{verb}")(
            peer.ref if isinstance(peer, Node) else peer,
            native.Elements(ours, own_ids),
            native.Elements(theirs, peer_ids),
            lanes=lanes or LANES,
        )
        prepared.start(transfer, int(deadline_s * SECOND), **options)

    def fetch(self, transfer: bytes, peer: Any, local: Any, remote: Any, **options: Any) -> None:
        self.post("fetch", transfer, peer, local, remote, **options)

    def push(self, transfer: bytes, peer: Any, local: Any, remote: Any, **options: Any) -> None:
        self.post("push", transfer, peer, local, remote, **options)

    def take(self) -> list[Any]:
        events = self.core.drain()
        self.events += events
        broken = [event.text for event in events if isinstance(event, native.CoreFailed)]
        assert not broken, broken
        return events

    def wait(self, condition: Callable[[list[Any]], Any], what: str = "", timeout_s: float = 30.0) -> Any:
        """What `condition` of all events so far is, once it is true."""
        end = time.monotonic() + timeout_s
        while True:
            self.take()
            if found := condition(self.events):
                return found
            left = end - time.monotonic()
            assert left > 0, (
                f"{self.ref}: {what or condition} did not come; events: {[type(e).__name__ for e in self.events][-20:]}"
            )
            select.select([self.core.fileno()], [], [], min(left, 1.0))

    def find(self, kind: type, **fields: Any) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind) and all(getattr(e, n) == v for n, v in fields.items())]

    def wait_for(self, kind: type, timeout_s: float = 30.0, **fields: Any) -> Any:
        return self.wait(lambda _: self.find(kind, **fields), f"{kind.__name__} {fields}", timeout_s)[0]

    def wait_begun(self, transfer: bytes) -> None:
        """Some of it came, perhaps all: what is final has no progress any more."""
        kinds = (native.TransferProgress, native.TransferFinal)
        self.wait(lambda _: any(self.find(kind, id=transfer) for kind in kinds), "a byte")

    def wait_drained(self, transfer: bytes, timeout_s: float = 30.0) -> Any:
        """The transfer's TransferFinal, once its blocks are the owner's again."""
        self.wait_for(native.TransferDrained, timeout_s, id=transfer)
        finals = self.find(native.TransferFinal, id=transfer)
        assert len(finals) == 1, "a transfer ends exactly once"
        assert len(self.find(native.TransferDrained, id=transfer)) == 1
        return finals[0]

    def is_idle(self) -> bool:
        counts = self.core.counts()
        busy = sum(p.granted + p.reserved + p.quarantined for p in counts.pools)
        busy += sum(r.grants + r.transfers for r in counts.regions)
        return busy + counts.transfers_live + counts.transfers_draining + counts.grants.alive == 0


def join(
    one: Node, other: Node, *, key: bytes | None = None, other_key: bytes | None = None, host: str = "127.0.0.1"
) -> None:
    key = key or os.urandom(32)
    one.core.set_peer(other.ref, key, tcp_host=host, tcp_port=other.core.tcp_port, unix_path=other.core.unix_path)
    other.core.set_peer(
        one.ref, other_key or key, tcp_host=host, tcp_port=one.core.tcp_port, unix_path=one.core.unix_path
    )


@dataclasses.dataclass
class Nodes:
    """Makes nodes, closes them at the end."""

    directory: pathlib.Path
    made: list[Node]

    def __call__(self, name: str, **options: Any) -> Node:
        self.made.append(Node(name, self.directory, **options))
        return self.made[-1]

    def pair(
        self, *, source: dict[str, Any] | None = None, reader: dict[str, Any] | None = None, **both: Any
    ) -> tuple[Node, Node]:
        """A source with random bytes and a reader full of poison that know each other."""
        p, d = self("source", **{**both, **(source or {})}), self("reader", **{**both, **(reader or {})})
        join(p, d)
        p.fill_random()
        d.fill(POISON)
        return p, d

    join = staticmethod(join)
    limits = staticmethod(endpoint_limits)
