"""Keeps the directory and the store in step: writes what this coordinator judges, takes in what others wrote. Decides
when the view of the others is current; must never know a stream, or judge a member.

What the store still lacks is held as state (agent ids to write, versions to remove), never as a queue of writes, and
is tried again for ever: the store's trouble never holds up an agent that is known. Only a new incarnation waits for the
store, because its number comes from there, and because what is known only here could be lost with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
from collections.abc import Callable, Set

from kvxfer.clock import Clock
from kvxfer.coordinator.store.base import MemberRecord, Store, StoreChange
from kvxfer.errors import CoordinatorUnavailableError, KvxferError
from kvxfer.protocol.directory import Directory, Effect, IncarnationEnded, MemberEvent
from kvxfer.types import AgentRef, Load, Membership

log = logging.getLogger("kvxfer.coordinator")

RETRY_FIRST_S, RETRY_MAX_S = 0.1, 1.0
LEAVE_S = 1.0
"""How long a coordinator that stops tries to write what the store lacks."""
WRITE_GAP_S = 0.02
"""Between two rounds of writes: what one agent changes meanwhile goes together."""


class StoreKeeper:
    """Runs on the coordinator's loop. Its effects go to ``carry_out``, which the service sets."""

    def __init__(self, directory: Directory, store: Store, clock: Clock) -> None:
        self.owner = secrets.token_hex(8)
        """This run of a coordinator, in the store."""
        self.carry_out: Callable[[tuple[Effect, ...]], None] = lambda effects: None
        self._directory = directory
        self._store = store
        self._clock = clock
        self._address = ""
        self._owners: dict[str, str] = {}
        """The coordinator that wrote the newest record of each agent id that is not ours."""
        self._alive: dict[str, str] = {}
        """The coordinators that are alive, and where they are reached."""
        self._heard: set[str] = set()
        """The other coordinators that answer us."""
        self._revision: int | None = None
        self._to_write: set[str] = set()
        self._to_remove: dict[str, tuple[AgentRef, int]] = {}
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._failure = ""
        self._watch_failure = ""

    @property
    def failure(self) -> str:
        """Why the store cannot be had now; empty while it can."""
        return self._failure or self._watch_failure

    @property
    def unwritten(self) -> int:
        """How many members' records the store lacks."""
        return len(self._to_write) + len(self._to_remove)

    @property
    def peers(self) -> dict[str, str]:
        """The other coordinators that are alive and can be reached: their addresses by name. One whose address is
        ours now is dead, though its lease may not be over."""
        others = {name: address for name, address in self._alive.items() if name != self.owner}
        return {name: address for name, address in others.items() if address not in ("", self._address)}

    def is_taken(self, address: str) -> bool:
        """Whether a coordinator that is alive, or this one, is reached at this address."""
        return address == self._address or address in self._alive.values()

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        """What runs until :meth:`close`; one that ends before is a fault of ours."""
        return tuple(self._tasks)

    def address_of(self, agent_id: str) -> str:
        """Where the other coordinator that wrote this member last is reached; empty where there is none."""
        return self.peers.get(self._owners.get(agent_id, ""), "")

    async def start(self, address: str) -> None:
        """Open the store, and know its members. ``address``: where other coordinators reach this one.

        Raises ConfigError for a store that can never be used as it is."""
        self._address = address
        await self._store.open(self.owner, address)
        if self._store.is_shared:
            self._directory.set_current(False, now_ns=self._clock.now_ns())
        else:
            now_ns = self._clock.now_ns()
            for record in await self._store.load():
                self._directory.told(record.member, record.sessions, is_judged=False, now_ns=now_ns)
            self._directory.begin_anew(now_ns)  # each has the grace of so many
        self._revision = self._directory.revision
        for run in (self._follow, self._write):
            self._tasks.append(asyncio.create_task(run(), name=f"kvxfer store {run.__name__}"))

    async def close(self) -> None:
        """Write what can be written now, and leave. Callable twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        with contextlib.suppress(CoordinatorUnavailableError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._write_round()
        await self._store.close()

    async def next_number(self) -> int:
        """Raises CoordinatorUnavailableError: at once where the store is known to be away, so that the agent hears."""
        if self._watch_failure:
            raise CoordinatorUnavailableError(f"no new incarnations now: {self._watch_failure}")
        try:
            return await self._store.next_number()
        except CoordinatorUnavailableError as error:
            self._failed(error)
            raise CoordinatorUnavailableError(f"no new incarnations now: {error}") from None

    async def admit_number(self, number: int) -> None:
        """Raises RefusedError for a number that no coordinator can have given."""
        await self._store.admit_number(number)

    async def keep(self, agent_id: str) -> None:
        """Write one member now. Raises CoordinatorUnavailableError."""
        record = self._record(agent_id)
        if record is not None:
            try:
                await self._store.put(record)
            except CoordinatorUnavailableError as error:
                self._failed(error)
                raise CoordinatorUnavailableError(f"no new incarnations now: {error}") from None

    async def catch_up(self) -> None:
        """Return once the directory has all that was written before, or says that it may not have it."""
        if self._watch_failure:
            return
        try:
            await self._store.catch_up()
        except CoordinatorUnavailableError as error:
            self._lost_view(str(error))

    def pass_on(self, agent_id: str) -> None:
        """Have the store say what an operator ordered for a member that another coordinator holds."""
        self._to_write.add(agent_id)
        self._wake.set()

    def take_view(self, owner: str, view: Membership) -> None:
        """What a coordinator says of all members: the loads of its own ones, and all else while the store does not
        know that it is alive."""
        now_ns = self._clock.now_ns()
        effects: list[Effect] = []
        for member in view.members:
            known = self._directory.known(member.ref.agent_id)
            if known is None or known[0].ref != member.ref or self._owners.get(member.ref.agent_id) != owner:
                continue
            if owner not in self._alive:
                effects += self._directory.told(member, known[1], is_judged=True, now_ns=now_ns)
            self._directory.set_load(member.ref, member.load)
        self.carry_out(tuple(effects))

    def heard(self, owner: str, is_heard: bool) -> None:
        """Whether a coordinator answers us. One that does is not dead, even where its lease is over: it is cut off
        from the store, and goes on judging its agents."""
        if is_heard:
            self._heard.add(owner)
        else:
            self._heard.discard(owner)
            self.carry_out(self._orphans(set(), self._clock.now_ns()))

    def _orphans(self, absent: Set[str], now_ns: int) -> tuple[Effect, ...]:
        """Begin the grace of those whose coordinator is dead, and of those that a whole view lacks."""
        effects: list[Effect] = []
        for agent_id, owner in self._owners.items():
            if agent_id in absent or not self._is_there(owner):
                effects += self._directory.orphan(agent_id, now_ns=now_ns)
        return tuple(effects)

    def _is_there(self, owner: str) -> bool:
        return owner in self._alive or owner in self._heard

    def changed(self, effects: tuple[Effect, ...]) -> None:
        """The directory changed, with these effects."""
        for effect in effects:
            if isinstance(effect, IncarnationEnded):
                self._owners.pop(effect.ref.agent_id, None)
                if effect.cause is not MemberEvent.ENDED:
                    self._to_remove[effect.ref.agent_id] = (effect.ref, effect.sessions)
        if self._directory.shape_revision != self._revision:
            self._wake.set()

    def _record(self, agent_id: str) -> MemberRecord | None:
        """What the store should have of a member; None where there is no such member."""
        known = self._directory.known(agent_id)
        if known is None:
            return None
        member, sessions, is_own = known
        owner = self.owner if is_own else self._owners.get(agent_id, self.owner)
        return MemberRecord(owner, sessions, dataclasses.replace(member, load=Load(), session_key=b""))

    async def _write(self) -> None:
        retry_s = RETRY_FIRST_S
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._write_round()
                if self._failure:
                    await self._store.check()
                retry_s = RETRY_FIRST_S
                self._recovered()
                await asyncio.sleep(WRITE_GAP_S)
            except CoordinatorUnavailableError as error:
                self._failed(error)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, RETRY_MAX_S)
                self._wake.set()

    async def _write_round(self) -> None:
        """Write all that the store lacks. Raises CoordinatorUnavailableError; what was not written stays to be."""
        change = self._directory.change_since(self._revision)
        self._revision = change.revision
        for member in change.members:
            known = self._directory.known(member.ref.agent_id)
            if known is not None and known[2]:
                self._to_write.add(member.ref.agent_id)
        for agent_id, version in list(self._to_remove.items()):
            if self._directory.known(agent_id) is None:
                await self._store.remove(*version)
            if self._to_remove.get(agent_id) == version:
                del self._to_remove[agent_id]
        for agent_id in list(self._to_write):
            self._to_write.discard(agent_id)  # what changes while it is written is to be written again
            record = self._record(agent_id)
            try:
                if record is not None:
                    await self._store.put(record)
            except BaseException:
                self._to_write.add(agent_id)
                raise

    async def _follow(self) -> None:
        while True:
            try:
                async for change in self._store.watch():
                    self._take(change)
            except CoordinatorUnavailableError as error:
                self._lost_view(str(error))
            await asyncio.sleep(RETRY_FIRST_S)

    def _take(self, change: StoreChange) -> None:
        now_ns = self._clock.now_ns()
        effects: list[Effect] = []
        came, went = set(change.owners) - set(self._alive), set(self._alive) - set(change.owners) - {self.owner}
        self._alive = {**change.owners, self.owner: ""}
        for agent_id in [agent_id for agent_id, owner in self._owners.items() if owner in came]:
            known = self._directory.known(agent_id)
            if known is not None:
                effects += self._directory.told(known[0], known[1], is_judged=True, now_ns=now_ns)
        for record in change.records:
            effects += self._take_record(record, now_ns)
        for agent_id in change.removed:
            effects += self._directory.ended(agent_id, now_ns=now_ns)
            self._rewrite_own(agent_id)
        absent = set(self._owners) - {record.agent_id for record in change.records} if change.is_whole else set()
        if absent or went or change.is_whole:
            effects += self._orphans(absent, now_ns)
        if change.is_whole:
            self._whole(change)
        self.carry_out(tuple(effects))

    def _take_record(self, record: MemberRecord, now_ns: int) -> tuple[Effect, ...]:
        if record.owner == self.owner and self._directory.known(record.agent_id) is None:
            # A write of ours that an etcd node took in late, when the member had ended.
            self._to_remove[record.agent_id] = (record.member.ref, record.sessions)
            self._wake.set()
            return ()
        effects = self._directory.told(
            record.member, record.sessions, is_judged=self._is_there(record.owner), now_ns=now_ns
        )
        known = self._directory.known(record.agent_id)
        if known is None:
            return effects
        member, sessions, is_own = known
        is_same = member.ref == record.member.ref
        if is_same and member.is_draining and not record.member.is_draining:
            self.pass_on(record.agent_id)  # the order was not written yet
        if is_own:
            self._owners.pop(record.agent_id, None)
            is_older = record.version < (member.ref.incarnation.number, sessions)
            if is_older or (record.owner != self.owner and not member.is_suspect):
                self._rewrite_own(record.agent_id)
        elif is_same:
            self._owners[record.agent_id] = record.owner
        return effects

    def _whole(self, change: StoreChange) -> None:
        """The view is current from now on; what others removed from the store of ours is written again."""
        here = {record.agent_id for record in change.records}
        for member in self._directory.change_since(None).members:
            if member.ref.agent_id not in here:
                self._rewrite_own(member.ref.agent_id)
        if self._watch_failure:
            log.warning("the store %s is read again", self._store)
        self._watch_failure = ""
        self._directory.set_current(True, now_ns=self._clock.now_ns())

    def _rewrite_own(self, agent_id: str) -> None:
        known = self._directory.known(agent_id)
        if known is not None and known[2]:
            self._to_write.add(agent_id)
            self._wake.set()

    def _lost_view(self, reason: str) -> None:
        if not self._watch_failure:
            log.warning("fail static, the view of other coordinators may be old: %s", reason)
        self._watch_failure = reason
        self._directory.set_current(False, now_ns=self._clock.now_ns())
        self.carry_out(())

    def _failed(self, error: KvxferError) -> None:
        if not self._failure:
            log.warning("fail static, running work goes on: %s", error)
        self._failure = str(error)
        self._wake.set()

    def _recovered(self) -> None:
        if self._failure:
            log.warning("the store %s takes writes again", self._store)
        self._failure = ""
