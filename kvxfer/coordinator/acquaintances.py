"""Has other coordinators tell their agents of agents here that named them. Decides what is asked of whom, and when
again; must never know why one agent looks for another.

What is asked is state: pairs of an agent and those that named it, until the coordinator that holds its session says
that it has told them, or until there is nothing to be told. So a coordinator that is silent, or an agent that moves to
yet another one meanwhile, costs time and no knowledge.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable

from kvxfer.coordinator.receivers import Receivers
from kvxfer.errors import KvxferError
from kvxfer.protocol.directory import Directory
from kvxfer.rpc.convert import NAMES_MAX
from kvxfer.rpc.watch import acquaint
from kvxfer.trust.files import FollowedFiles

log = logging.getLogger("kvxfer.coordinator")

GATHER_S = 0.02
"""What is named within this time goes together."""
AGAIN_S = 0.5
"""Between two rounds for what could not be told."""
PAIRS_MAX = 1 << 18
"""Pairs that wait to be told. Beyond, an agent of this coordinator may have to ask again."""


class Acquaintances:
    """Of one coordinator. Runs on its loop."""

    def __init__(
        self,
        directory: Directory,
        receivers: Receivers,
        address_of: Callable[[str], str],
        token: bytes,
        tls: FollowedFiles | None,
    ) -> None:
        """``address_of``: where the coordinator of an agent is reached, empty if that is not known now. ``tls``: this
        coordinator's own certificate; None: the cluster token is shown."""
        self._directory = directory
        self._receivers = receivers
        self._address_of = address_of
        self._token = token
        self._tls = tls
        self._untold: dict[str, set[str]] = {}
        """Who named each agent, and is to be told to it."""
        self._pairs = 0
        self._wake = asyncio.Event()
        self._calls: dict[str, asyncio.Task[None]] = {}
        """The call to each address that is under way."""
        self._silent: set[str] = set()
        """The addresses that did not answer the last call."""
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """How many pairs wait."""
        return self._pairs

    def add(self, agent_id: str, others: Iterable[str]) -> None:
        """``others`` named an agent that another coordinator holds."""
        waiting = self._untold.setdefault(agent_id, set())
        before = len(waiting)
        for other in others:
            if self._pairs + len(waiting) - before >= PAIRS_MAX:
                log.warning("%s may not hear of all that look for it: PAIRS_MAX=%d wait", agent_id, PAIRS_MAX)
                break
            waiting.add(other)
        self._pairs += len(waiting) - before
        self._wake.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="kvxfer acquaintances")

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        """What runs until :meth:`close`; one that ends before is a fault of ours."""
        return (self._task,) if self._task is not None else ()

    async def close(self) -> None:
        tasks = [*self._calls.values(), *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S if self._untold else None):
                    await self._wake.wait()
            await asyncio.sleep(GATHER_S)
            self._wake.clear()
            for address, batch in self._batches().items():
                self._calls[address] = asyncio.create_task(self._tell(address, batch))

    def _batches(self) -> dict[str, dict[str, set[str]]]:
        """What is to be asked now of each address that answers no call yet: at most NAMES_MAX names each."""
        batches: dict[str, dict[str, set[str]]] = {}
        room: dict[str, int] = {}
        for agent_id in list(self._untold):
            waiting = self._untold[agent_id]
            if agent_id in self._receivers or agent_id not in self._directory:
                self._done(agent_id, set(waiting))  # who comes here, or comes back, is told then
                continue
            self._done(agent_id, {other for other in waiting if not self._receivers.is_told_of(other, agent_id)})
            address = self._address_of(agent_id)
            if not waiting or not address or address in self._calls:
                continue
            left = room.setdefault(address, NAMES_MAX)
            if left > 1:
                batches.setdefault(address, {})[agent_id] = set(sorted(waiting)[: left - 1])
                room[address] = left - 1 - len(batches[address][agent_id])
        return batches

    async def _tell(self, address: str, batch: dict[str, set[str]]) -> None:
        try:
            absent = await acquaint(address, self._token, batch, tls=self._tls)
        except KvxferError as error:
            if address not in self._silent:
                log.warning("agents may not hear yet of those that look for them: %s", error)
            self._silent.add(address)
            return
        finally:
            del self._calls[address]
        self._silent.discard(address)
        for agent_id, others in batch.items():
            if agent_id not in absent:
                self._done(agent_id, others)
        if len(absent) < len(batch):
            self._wake.set()

    def _done(self, agent_id: str, others: set[str]) -> None:
        waiting = self._untold.get(agent_id)
        if waiting is None:
            return
        self._pairs -= len(waiting & others)
        waiting -= others
        if not waiting:
            del self._untold[agent_id]
