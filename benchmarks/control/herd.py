"""Many agents in one process, each a real :class:`kvxfer.rpc.CoordinatorSession` with a connection of its own. Decides
nothing; the parent says over stdin what to do, and reads one JSON line for each answer.

    python -m control.herd ADDRESS TOKEN_FILE FIRST COUNT PEERS

PEERS: how many other agents each agent asks for, as one that pulls from them does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
import time
from typing import Any

from kvxfer import open_files
from kvxfer.rpc import CoordinatorSession, load_token
from kvxfer.types import (
    AgentRef,
    CompatibilityRecord,
    DataAddress,
    Exposure,
    Load,
    Membership,
    PoolRecord,
    Role,
    WorkerInfo,
)

RECORD = CompatibilityRecord(
    "meta-llama/Llama-3.1-8B", "c" * 16, "w" * 16, "bfloat16", 32, 8, 128, 16, "lb2thd", "plain", "rope", "flash"
)
JOIN_S = 600.0
AT_ONCE = 128
"""First registrations at a time of one process, which would else stand in its own way. A return has no such bound."""


def agent_id(number: int) -> str:
    return f"worker-{number:05d}"


def session(address: str, token: bytes, number: int, **callbacks: Any) -> CoordinatorSession:
    """An agent as one of ours registers: one pool, a load, an HTTP server, a data address."""
    return CoordinatorSession(
        address,
        token,
        number.to_bytes(16, "big"),
        WorkerInfo(agent_id(number), Role.BOTH, RECORD.model, f"http://127.0.0.1:{20000 + number % 40000}", 8192, 16),
        DataAddress("127.0.0.1", 1024 + number % 60000, f"/run/kvxfer/{agent_id(number)}", "host"),
        (PoolRecord(1, RECORD, 4096, 2 << 20, Exposure.GRANT, False),),
        source=random.Random(number),
        **callbacks,
    )


class Herd:
    """COUNT agents on one loop."""

    def __init__(self, address: str, token: bytes, first: int, count: int, peers: int) -> None:
        self.gone = 0
        self.losses = 0
        self.peers = peers
        self.numbers = range(first, first + count)
        self.sessions = [
            session(address, token, number, on_membership=self.heard, on_state=self.state) for number in self.numbers
        ]

    def heard(self, membership: Membership) -> None:
        self.gone += len(membership.gone)

    def state(self, is_connected: bool) -> None:
        self.losses += not is_connected

    async def join(self) -> dict[str, Any]:
        started_s = time.monotonic()
        room = asyncio.Semaphore(AT_ONCE)

        async def start(each: CoordinatorSession) -> AgentRef:
            async with room:
                return await each.start(JOIN_S)

        refs = await asyncio.gather(*map(start, self.sessions))
        return {"joined": len(set(refs)), "seconds": time.monotonic() - started_s}

    def ask(self) -> dict[str, Any]:
        """Each asks for its peers."""
        everyone, source = list(self.numbers), random.Random(30)
        for each in self.sessions:
            for number in source.sample(everyone, min(self.peers, len(everyone))):
                each.ask(agent_id(number))
        return {}

    def vary(self) -> dict[str, Any]:
        """A new load for each agent."""
        source = random.Random(time.monotonic_ns())
        for each in self.sessions:
            each.set_load(Load(source.randrange(64), source.randrange(64), source.randrange(1 << 16), 1000, 4096))
        return {}

    def statistics(self) -> dict[str, Any]:
        return {
            "connected": sum(each.is_connected for each in self.sessions),
            "heartbeats": sum(each.heartbeats for each in self.sessions),
            "gone": self.gone,
            "losses": self.losses,
            "members_known": sum(len(each.membership.members) for each in self.sessions) / len(self.sessions),
            "cpu_s": time.process_time(),
        }


async def main() -> None:
    address, token_file, first, count, peers = sys.argv[1:]
    logging.basicConfig(level=logging.ERROR)
    open_files.raise_limit()
    herd = Herd(address, load_token(token_file), int(first), int(count), int(peers))
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        answer: dict[str, Any] = {}
        match line.strip():
            case "join":
                answer = await herd.join()
            case "ask":
                answer = herd.ask()
            case "vary":
                answer = herd.vary()
            case "statistics":
                answer = herd.statistics()
            case "quit":
                break
        print(json.dumps(answer), flush=True)
    print("{}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
