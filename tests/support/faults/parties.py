"""One agent of the fault tests: a transport with a painted pool, registered memory and proxies, asked for everything in
words that fit JSON, so that it is the same whether it runs in the test's process or in one that can be killed.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvxfer._native import _core
from kvxfer.config import AgentConfig
from kvxfer.errors import BlocksBusyError, KvxferError
from kvxfer.testing.contract.parties import RECORD
from kvxfer.transport import counts
from kvxfer.transport.base import allocate_region
from kvxfer.transport.engine import MemoryRegistration, Op, RemotePeer, TransferBatch, TransferEngine
from kvxfer.transport.native import NativeBinding
from kvxfer.types import (
    AgentRef,
    DataAddress,
    Exposure,
    Incarnation,
    Lane,
    PoolRecord,
    RegionRecord,
    Segment,
    TransferId,
    TransferState,
)
from tests.support.faults.fault_proxy import FaultProxy

KEY = bytes(range(32))
POOL = 7
POISON = 0xEE
SOON_S = 20.0
SO_BUF_LOCK = 72
"""asm-generic/socket.h"""


class Party:
    """``lanes``: by name, best first; ``remembered``: how many grants and transfers at most, and how many of those that
    are over; ``stripes``: connections to one peer. Transfers and posts go by a name of the test's choice: 32 hex
    digits, or "p1"."""

    def __init__(
        self,
        name: str,
        lanes: Sequence[str],
        *,
        blocks: int = 64,
        block_bytes: int = 4096,
        stall_s: float = 5.0,
        reconnect_s: float = 0.6,
        grant_ttl_s: float = 30.0,
        bind_host: str = "127.0.0.1",
        remembered: int = AgentConfig.transfers_max,
        stripes: int = AgentConfig.stripes,
        refusals_max: int = AgentConfig.refusals_max,
    ) -> None:
        self.config = AgentConfig(
            lanes=tuple(Lane(lane) for lane in lanes),
            calibrate=False,
            stall_s=stall_s,
            reconnect_s=reconnect_s,
            grant_ttl_s=grant_ttl_s,
            bind_host=bind_host,
            insecure=True,
            grants_max=remembered,
            transfers_max=remembered,
            stripes=stripes,
            refusals_max=refusals_max,
        )
        binding = NativeBinding(self.config)
        self.ref = AgentRef(name, Incarnation(1, secrets.token_bytes(16)))
        self.transport = binding.open(self.ref, self.config)
        self.core = self.transport.core
        self.poster = TransferEngine(self.transport, config=self.config, drain=self.drain)
        self.blocks, self.block_bytes = blocks, block_bytes
        region = allocate_region(blocks * block_bytes)
        memory: Any = region.owner
        self.memory = memory
        self.memory[:] = POISON
        pool = PoolRecord(POOL, RECORD, blocks, block_bytes, Exposure.POOL, True)
        self.transport.add_pool(pool, region, [Segment(0, block_bytes, block_bytes)])
        self.finals: dict[str, Any] = {}
        self.drained: set[str] = set()
        self.done: dict[str, int] = {}
        self.ended: dict[str, str] = {}
        self.offers: list[Any] = []
        self.received: list[bytes] = []
        self.peers: dict[str, RemotePeer] = {}
        self.regions: list[MemoryRegistration | None] = []
        self.posts: dict[str, TransferBatch] = {}
        self.proxies: list[FaultProxy] = []
        self._drain_lock = threading.RLock()
        self.known_regions: dict[int, Any] = {}

    # --- names and addresses ---

    def metadata(self, proxy: int | None = None) -> dict[str, Any]:
        """What a peer needs: how to reach us (through a proxy), and what is registered here."""
        address = self.transport.address
        tcp_port, unix_path = address.tcp_port, address.unix_path
        if proxy is not None:
            tcp_port, unix_path = self.proxies[proxy].tcp_port, self.proxies[proxy].unix_path
        return {
            "ref": [self.ref.agent_id, self.ref.incarnation.boot_nonce.hex()],
            "address": [address.tcp_host, tcp_port, unix_path, address.host_id, list(address.lanes)],
            "records": [r.record.to_json() for r in self.regions if r is not None],
        }

    def add_peer(self, metadata: dict[str, Any]) -> str:
        """Know that peer, or what it says of itself now; returns its name."""
        name, nonce = metadata["ref"]
        host, port, path, host_id, lanes = metadata["address"]
        ref = AgentRef(name, Incarnation(1, bytes.fromhex(nonce)))
        address = DataAddress(host, port, path, host_id, tuple(Lane(lane) for lane in lanes))
        self.peers[name] = RemotePeer(ref, address, [RegionRecord.from_json(text) for text in metadata["records"]])
        self.transport.set_peer(ref, address, KEY)
        return str(name)

    def peer_dead(self, peer: str) -> None:
        self.transport.peer_dead(self.peers.pop(peer).ref)

    def open_proxy(self, metadata: dict[str, Any] | None = None) -> int:
        """A proxy in front of us, or of the peer that the metadata tells of; returns its number."""
        host, port, path, *_ = (metadata or self.metadata())["address"]
        self.proxies.append(FaultProxy((host, port), path))
        return len(self.proxies) - 1

    def proxied(self, metadata: dict[str, Any], proxy: int) -> dict[str, Any]:
        """The metadata of a peer that is to be dialed through one of our proxies."""
        host, _, _, *rest = metadata["address"]
        return {**metadata, "address": [host, self.proxies[proxy].tcp_port, self.proxies[proxy].unix_path, *rest]}

    def proxy(self, index: int, verb: str, *arguments: Any) -> Any:
        return getattr(self.proxies[index], verb)(*arguments)

    # --- grants and pulls ---

    def grant(self, transfer: str, blocks: Sequence[int], ready: int, ttl_s: float = 30.0, reader: str = "") -> None:
        self.transport.grant(
            TransferId.from_hex(transfer),
            POOL,
            np.asarray(blocks, np.uint32),
            reader=reader,
            ttl_s=ttl_s,
            ready_blocks=0,
        )
        if ready:
            self.ready(transfer, ready, ready == len(blocks))

    def ready(self, transfer: str, count: int, complete: bool) -> None:
        self.transport.ready(TransferId.from_hex(transfer), count, layers=0, complete=complete)

    def revoke(self, transfer: str) -> str:
        return self.transport.revoke_grant(TransferId.from_hex(transfer)).name

    def grant_state(self, transfer: str) -> str:
        state = self.transport.grant_state(TransferId.from_hex(transfer))
        return "" if state is None else state.name

    def pull(self, transfer: str, peer: str, blocks: Sequence[int], deadline_s: float = 60.0) -> None:
        self.transport.pull(
            TransferId.from_hex(transfer),
            self.peers[peer].ref,
            POOL,
            np.asarray(blocks, np.uint32),
            first=0,
            lanes=self.config.lanes,
            deadline_s=deadline_s,
        )

    def cancel(self, transfer: str) -> None:
        if transfer in self.posts:
            self.posts[transfer].cancel()
        else:
            self.transport.cancel(TransferId.from_hex(transfer))

    # --- posts ---

    def allocate(self, nbytes: int, *, is_foreign: bool = False, can_read: bool = True, can_write: bool = True) -> int:
        """Register poisoned memory; returns its index here."""
        memory = np.zeros(nbytes, np.uint8) if is_foreign else allocate_region(nbytes)
        made = self.poster.register(memory, can_read=can_read, can_write=can_write)
        self.regions.append(made)
        self.region(len(self.regions) - 1)[:] = POISON
        return len(self.regions) - 1

    def region(self, index: int) -> Any:
        """The bytes of it; also after it was taken back."""
        if index not in self.known_regions:
            registration = self.regions[index]
            assert registration is not None
            self.known_regions[index] = registration.region.owner
        return self.known_regions[index]

    def region_id(self, index: int) -> int:
        registration = self.regions[index]
        assert registration is not None
        return registration.record.region_id

    def region_file(self, index: int) -> int:
        """The descriptor of its memory file, for a look from outside."""
        registration = self.regions[index]
        assert registration is not None
        assert registration.region.shared is not None
        return registration.region.shared.fileno()

    def deregister(self, index: int, within_s: float = SOON_S) -> None:
        registration = self.regions[index]
        assert registration is not None

        def is_gone() -> bool:
            try:
                self.poster.deregister(registration)
            except BlocksBusyError:
                return False
            return True

        assert self._wait(is_gone, within_s), "the region stayed busy"
        self.regions[index] = None

    def post(
        self,
        name: str,
        op: str,
        peer: str,
        mine: int,
        theirs: int,
        *,
        element: int = 65536,
        nbytes: int | None = None,
        deadline_s: float = 60.0,
    ) -> None:
        """Read from, or write to, the peer's region number ``theirs`` (in its metadata), element by element."""
        registration = self.regions[mine]
        assert registration is not None
        local, remote = registration.record, self.peers[peer].records[theirs]
        size = min(nbytes or local.length_bytes, remote.length_bytes, local.length_bytes)
        offsets = np.arange(0, size, element, dtype=np.uint64)
        lists = []
        for record in (local, remote):
            rows = np.zeros((len(offsets), 3), np.uint64)
            rows[:, 0], rows[:, 1] = offsets + np.uint64(record.address), element
            lists.append(rows)
        self.posts[name] = self.poster.post(
            Op(op),
            self.poster.prepare(lists[0]),
            None,
            self.poster.prepare(lists[1], peer=self.peers[peer]),
            None,
            deadline_s=deadline_s,
        )

    # --- what became of it ---

    def drain(self) -> None:
        with self._drain_lock:
            for event in self.transport.drain():
                self.poster.handle(event)
                self._take(event)

    def _take(self, event: Any) -> None:
        if isinstance(event, _core.CoreFailed):
            raise AssertionError(f"the core of {self.ref} failed: {event.text}")
        if isinstance(event, _core.TransferFinal):
            assert event.id.hex() not in self.finals, "a transfer ends once"
            self.finals[event.id.hex()] = event
        elif isinstance(event, _core.TransferDrained):
            assert event.id.hex() in self.finals, "final is told before drained"
            self.drained.add(event.id.hex())
        elif isinstance(event, _core.TransferProgress):
            self.done[event.id.hex()] = event.done
        elif isinstance(event, _core.GrantEnded):
            self.ended[event.id.hex()] = event.state.name
        elif isinstance(event, _core.OfferEnded):
            self.offers.append(event)
        elif isinstance(event, _core.NotifReceived):
            self.received.append(event.payload)

    def _wait(self, until: Callable[[], bool], timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        events = select.poll()
        events.register(self.transport.fileno(), select.POLLIN)
        while True:
            self.drain()
            if until():
                return True
            if time.monotonic() >= end:
                return False
            events.poll(5)

    def state(self, transfer: str) -> list[Any]:
        """Of a transfer: its state's name, and how many blocks have landed."""
        self.drain()
        if transfer in self.posts:
            return [self.posts[transfer].poll().name, 0]
        state = self.transport.transfer_state(TransferId.from_hex(transfer))
        return ["" if state is None else state.name, self.done.get(transfer, 0)]

    def wait_state(self, transfer: str, state: str, done: int = 0, timeout_s: float = SOON_S) -> bool:
        return self._wait(lambda: self.state(transfer) == [state, done], timeout_s)

    def outcome(self, transfer: str, timeout_s: float = SOON_S) -> str:
        """``committed`` or the error's code, once the transfer or post is final and drained; "" while it is not."""
        if transfer in self.posts:
            post = self.posts[transfer]
            if not self._wait(lambda: post.is_final and post.is_drained, timeout_s):
                return ""
            return "committed" if post.error is None else post.error.code
        if not self._wait(lambda: transfer in self.drained, timeout_s):
            return ""
        final = self.finals[transfer]
        is_committed = TransferState(int(final.state)) is TransferState.COMMITTED
        return "committed" if is_committed else str(final.code.name)

    def why(self, transfer: str) -> str:
        """Of a transfer or post that is over, for a message."""
        return repr(self.posts[transfer].error if transfer in self.posts else self.finals.get(transfer))

    def wait_ended(self, transfer: str, timeout_s: float = SOON_S) -> str:
        """How a grant ended."""
        self._wait(lambda: transfer in self.ended, timeout_s)
        return self.ended.get(transfer, "")

    def wait_idle(self, timeout_s: float = 8.0) -> str:
        """ "" once nothing is promised, under way or quarantined; what is, where that does not come."""
        is_idle = self._wait(lambda: counts.is_idle(self.transport.counts()) and not self.poster.batches, timeout_s)
        self.drain()  # what ended between the last look at the events and the one that found it idle
        return "" if is_idle else counts.describe(self.transport.counts())

    def wait_hung_up(self, left: int = 0, timeout_s: float = SOON_S) -> bool:
        """Until so many sessions are up at most."""
        return self._wait(lambda: self.transport.counts().sessions_up <= left, timeout_s)

    def wait_dialed(self, timeout_s: float = SOON_S) -> bool:
        """Until no session is being opened."""
        return self._wait(lambda: self.transport.counts().sessions_opening == 0, timeout_s)

    def offer(self, peer: str, timeout_s: float = SOON_S, number: int = 0) -> str:
        """How a write of that peer into our memory ended, the first (0) or a later one; "" where it did not."""

        def mine() -> list[Any]:
            return [event for event in self.offers if event.sender.agent_id == peer]

        self._wait(lambda: len(mine()) > number, timeout_s)
        return str(mine()[number].state.name) if len(mine()) > number else ""

    def wait_received(self, payload: str, timeout_s: float = SOON_S) -> bool:
        return self._wait(lambda: payload.encode() in self.received, timeout_s)

    def forget(self) -> None:
        """What was written down here of what is over."""
        for kept in (self.finals, self.drained, self.done, self.ended, self.offers):
            kept.clear()

    def statistics(self) -> dict[str, int]:
        native = self.core.statistics()
        return {name: getattr(native, name) for name in dir(native) if not name.startswith("_")}

    def connections(self) -> list[dict[str, Any]]:
        """Of each TCP connection: whether its send buffer has a fixed size, and its congestion control."""
        return connections()

    # --- memory ---

    def fill(self, seed: int, region: int | None = None) -> None:
        memory = self.memory if region is None else self.region(region)
        memory[:] = pattern(seed, memory.size)

    def paint(self, value: int, blocks: Sequence[int] | None = None, region: int | None = None) -> None:
        self._view(blocks, region)[:] = value

    def is_painted(self, value: int, blocks: Sequence[int] | None = None, region: int | None = None) -> bool:
        return bool((self._view(blocks, region) == value).all())

    def is_filled(
        self, seed: int, blocks: Sequence[int] | None = None, region: int | None = None, offset: int = 0
    ) -> bool:
        """Whether it holds what :meth:`fill` puts there, from its begin or from ``offset`` bytes on."""
        view = self._view(blocks, region)
        return bool(np.array_equal(view, pattern(seed, offset + view.size)[offset:]))

    def _view(self, blocks: Sequence[int] | None, region: int | None) -> Any:
        memory = self.memory if region is None else self.region(region)
        if blocks is None:
            return memory
        return memory[blocks[0] * self.block_bytes : (blocks[-1] + 1) * self.block_bytes]

    def resources(self) -> dict[str, int]:
        return resources()

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.shut()
        self.transport.close()
        self.transport.drain()


def pattern(seed: int, nbytes: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def resources() -> dict[str, int]:
    """What this process holds."""
    status = pathlib.Path("/proc/self/status").read_text()
    rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    names = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return {
        "descriptors": len(names),
        "sockets": sum("socket:" in name for name in names),
        "mappings": len(pathlib.Path("/proc/self/maps").read_text().splitlines()),
        "threads": len(os.listdir("/proc/self/task")),
        "rss_kib": rss,
    }


def connections() -> list[dict[str, Any]]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        if not os.path.realpath(f"/proc/self/fd/{name}").rpartition("/")[2].startswith("socket:"):
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            one.getpeername()  # raises where it listens
            lock = one.getsockopt(socket.SOL_SOCKET, SO_BUF_LOCK)
            control = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            found.append({"bounded": lock & 1, "control": control.rstrip(b"\0").decode()})
    return found


__all__ = ["KEY", "POISON", "KvxferError", "Party", "pattern", "resources"]
