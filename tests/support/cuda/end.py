"""One end of transfers, in a process of its own: memory on a device or of the host, told what to do on stdin, one JSON
line each way. A request is ``{"do": name, ...}`` and calls ``End.do_name``.

usage: python -m tests.support.cuda.end NAME LANE,LANE
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import traceback
from typing import Any

import numpy as np
import torch

from kvxfer._native import _core as native
from kvxfer.config import AgentConfig
from kvxfer.transport.base import write_ref
from kvxfer.transport.descriptors import RemotePeer
from kvxfer.transport.engine import Op, TransferBatch, TransferEngine
from kvxfer.transport.host_memory import region_of
from kvxfer.transport.native import NativeBinding
from kvxfer.types import AgentRef, DataAddress, Incarnation, Lane, MemoryKind, RegionRecord

POISON = 0xEE
POOL = 9
KEY = b"k" * 32
SECOND = 1_000_000_000
WAIT_S = 60.0


def content(seed: int, nbytes: int) -> Any:
    """What memory of this seed holds."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def ref_of(name: str) -> AgentRef:
    return AgentRef(name, Incarnation(1, b"n" * 16))


class End:
    """An agent's transport and its posts, without a coordinator. Memory has names."""

    def __init__(self, name: str, lanes: str) -> None:
        config = AgentConfig(lanes=tuple(Lane(lane) for lane in lanes.split(",")))
        self.events: list[Any] = []
        self.transport = NativeBinding(config).open(ref_of(name), config)
        self.poster = TransferEngine(self.transport, config=config, drain=self.drain)
        self.memories: dict[str, tuple[Any, Any]] = {}
        """name -> (the whole tensor, the part of it that is registered)"""
        self.registrations: dict[str, Any] = {}
        self.posts: dict[int, TransferBatch] = {}

    def drain(self) -> None:
        """Posts get their events; those of pulls are kept."""
        self.events += [event for event in self.transport.drain() if not self.poster.handle(event)]

    # --- identity ---

    def do_contact(self) -> dict[str, Any]:
        address = self.transport.address
        return {
            "name": self.transport.ref.agent_id,
            "tcp": [address.tcp_host, address.tcp_port],
            "unix": [address.unix_path, address.host_id],
            "lanes": list(address.lanes),
            "obstacle": self.transport.core.ucx_obstacle,
        }

    def do_meet(self, other: dict[str, Any]) -> None:
        lanes = tuple(Lane(name) for name in other["lanes"])
        self.far = ref_of(other["name"])
        self.far_address = DataAddress(*other["tcp"], *other["unix"], lanes)
        self.transport.set_peer(self.far, self.far_address, KEY)

    # --- memory ---

    def do_allocate(self, name: str, place: str, nbytes: int, seed: int | None = None, margin: int = 0) -> int:
        """Memory with so many bytes of poison on either side; without a seed it is all poison. Its address."""
        whole = torch.full((nbytes + 2 * margin,), POISON, dtype=torch.uint8, device=place)
        part = whole[margin : margin + nbytes]
        if seed is not None:
            part.copy_(torch.from_numpy(content(seed, nbytes)))
        self.settle(place)
        self.memories[name] = whole, part
        return int(part.data_ptr())

    def do_fill(self, name: str, value: int = 0, seed: int | None = None) -> None:
        """Write over all of it: one value, or what memory of that seed holds."""
        whole, part = self.memories[name]
        if seed is None:
            part.fill_(value)
        else:
            part.copy_(torch.from_numpy(content(seed, part.nbytes)))
        self.settle(str(whole.device))

    @staticmethod
    def settle(place: str) -> None:
        if place.startswith("cuda"):
            torch.cuda.synchronize()

    def do_free(self, name: str) -> None:
        """Back to the device's driver, not only to torch."""
        del self.memories[name]
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def do_dump(self, name: str, path: str) -> None:
        self.memories[name][0].cpu().numpy().tofile(path)

    def do_pool(
        self, name: str, block_bytes: int, blocks: int, segments: list[list[int]], has_checksums: bool = False
    ) -> None:
        region = region_of(self.memories[name][1])
        info = native.PoolInfo(POOL, blocks, block_bytes, b"d" * 32, False, True, has_checksums)
        device = region.device if region.memory is MemoryKind.CUDA else -1
        parts = [(offset, stride, length) for offset, stride, length in segments]
        core = self.transport.core
        core.add_foreign_pool(info, region.address, region.length_bytes, region.owner, parts, device)

    def do_remove_pool(self) -> None:
        self.transport.core.remove_pool(POOL)

    def do_register(self, name: str) -> str:
        self.registrations[name] = self.poster.register(self.memories[name][1])
        return str(self.registrations[name].record.to_json())

    def do_deregister(self, name: str) -> None:
        self.poster.deregister(self.registrations.pop(name))

    # --- pools ---

    def do_grant(self, transfer: str, blocks: list[int], ready: int | None = None) -> None:
        core, count = self.transport.core, len(blocks) if ready is None else ready
        core.grant(bytes.fromhex(transfer), POOL, np.array(blocks, np.uint32), reader="", ttl_ns=60 * SECOND)
        core.ready(bytes.fromhex(transfer), count, complete=count == len(blocks))

    def do_ready(self, transfer: str, count: int) -> None:
        self.transport.core.ready(bytes.fromhex(transfer), count, complete=True)

    @staticmethod
    def do_capture(for_s: float) -> int:
        """Capture a CUDA graph for so long, in the global mode, and run it; how many kernels it has."""
        counter, kernels = torch.zeros(1, device="cuda"), 0
        graph, end = torch.cuda.CUDAGraph(), time.monotonic() + for_s
        with torch.cuda.graph(graph, capture_error_mode="global"):
            while time.monotonic() < end:
                counter.add_(1)
                kernels += 1
                time.sleep(0.001)
        graph.replay()
        torch.cuda.synchronize()
        assert int(counter.item()) == kernels
        return kernels

    def do_revoke_and_fill(self, transfer: str, after_s: float, name: str, value: int) -> str:
        """End the grant after so long, and write over its blocks as soon as that has returned; the state it is in."""
        time.sleep(after_s)
        state = self.transport.core.end_grant(bytes.fromhex(transfer), native.GrantEvent.REVOKE)
        self.do_fill(name, value)
        return str(state.name)

    def do_pull(self, transfer: str, blocks: list[int], lanes: list[str]) -> None:
        self.transport.core.pull(
            bytes.fromhex(transfer),
            write_ref(self.far),
            POOL,
            np.array(blocks, np.uint32),
            lanes=[getattr(native.Lane, lane.upper()) for lane in lanes],
            deadline_ns=time.monotonic_ns() + int(WAIT_S * SECOND),
        )

    def do_wait(self, transfer: str) -> dict[str, Any]:
        """How a pull ended, once its blocks are ours again; ``seconds``: from this call on."""
        identity, begin = bytes.fromhex(transfer), time.monotonic()
        final = self.event(native.TransferFinal, identity)
        seconds = time.monotonic() - begin
        self.event(native.TransferDrained, identity)
        return {
            "state": final.state.name,
            "code": final.code.name,
            "lane": final.lane.name.lower(),
            "text": final.text,
            "notes": final.lane_notes,
            "checked": final.blocks_checked,
            "seconds": seconds,
        }

    def event(self, kind: type, identity: bytes) -> Any:
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            self.poster.poll()
            for event in self.events:
                if isinstance(event, kind) and event.id == identity:
                    return event
            self.transport.wait(0.2)
        raise TimeoutError(f"no {kind.__name__}")

    @staticmethod
    def do_counts(library: str) -> dict[str, int]:
        """What counting_cuda.cpp, which this process has loaded, has counted."""
        loaded = ctypes.CDLL(library)
        return {name: int(getattr(loaded, f"counted_{name}")()) for name in ("batches", "copies", "failures")}

    # --- registered memory ---

    def do_post(
        self,
        op: str,
        near: list[list[int]],
        far: list[list[int]],
        records: list[str],
        lane: str,
        checksums: bool = False,
    ) -> int:
        """``near`` and ``far`` are rows (address, length, device, count, stride)."""
        peer = RemotePeer(self.far, self.far_address, tuple(RegionRecord.from_json(record) for record in records))
        local = self.poster.prepare(np.array(near, np.uint64))
        remote = self.poster.prepare(np.array(far, np.uint64), peer=peer)
        plan = self.poster.plan(Op(op), local, None, remote, None)
        number = len(self.posts)
        self.posts[number] = self.poster.start(plan, lanes=[Lane(lane)], wants_checksums=checksums, deadline_s=WAIT_S)
        return number

    def do_finish(self, number: int) -> dict[str, Any]:
        """How a post ended, once it has drained."""
        post, end = self.posts[number], time.monotonic() + WAIT_S
        while not post.is_drained:
            assert time.monotonic() < end, repr(post)
            self.transport.wait(0.2)
            self.poster.poll()
        try:
            result = post.result()
        except Exception as error:
            return {"state": "FAILED", "text": f"{type(error).__name__}: {error}"}
        return {"state": "COMMITTED", "lane": result.lane.value, "text": result.lane_reason}


def main(name: str, lanes: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries may print
    end = End(name, lanes)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"ok": getattr(end, f"do_{request.pop('do')}")(**request)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    end.transport.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
