"""The store of several coordinators: etcd's keys, leases and watches. Decides when a watch is believed; must never
judge a member.

Keys, below PREFIX: ``number`` is the counter, ``agents/ID`` a member's record, ``coordinators/NAME`` is there while
that coordinator renews its lease. Two pulses, each PULSE_S: one renews the lease, the other asks (a read that needs a
majority) whether something was written that the watch has not given: a watch at an endpoint that hangs, or that has
lost the majority, stays silent and must not pass for a quiet one. Neither waits for the other, because a coordinator
that is cut off must know that its view is old (PULSE_S + CATCH_UP_S) before its silent agents seem dead to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from kvxfer.coordinator.store.base import MemberRecord, NumberLine, StoreChange, Version, readable
from kvxfer.coordinator.store.etcd_link import EtcdLink, rpc, text_of
from kvxfer.coordinator.store.etcd_tls import EtcdFiles
from kvxfer.errors import CoordinatorUnavailableError, KvxferError
from kvxfer.types import AgentRef

log = logging.getLogger("kvxfer.coordinator")

PREFIX = b"/kvxfer/v1/"
NUMBER, AGENTS, OWNERS = PREFIX + b"number", PREFIX + b"agents/", PREFIX + b"coordinators/"
PULSE_S = 1.0
CATCH_UP_S = 1.0
"""How long the newest change may take to be asked for and to come by the watch, before the watch begins anew. An agent
that has just registered waits so long for its first view, and is not patient for much longer."""
TRIES = 30
"""Of one write that others' writes come between."""


class EtcdStore:
    """All coordinators of a cluster name the same etcd. Runs on one asyncio loop."""

    is_shared = True

    def __init__(
        self, endpoints: tuple[str, ...], wall_clock_us: int, *, lease_s: float, files: EtcdFiles | None = None
    ) -> None:
        """``lease_s``: so long after its last renewal a coordinator counts as dead, rounded up to whole seconds.
        Without ``files`` the connections are plain."""
        self._link = EtcdLink(endpoints, files)
        self._numbers = NumberLine(wall_clock_us)
        self._number_lock = asyncio.Lock()
        self._number_at = (0, 0)
        """The counter as it was last seen in etcd, and in which revision it was written."""
        self._lease_s = math.ceil(lease_s)
        self._lease = 0
        self._renewing = asyncio.Lock()
        """Of two leases that are taken at once, the one that is forgotten could be the one that our key is under."""
        self._owner = self._address = ""
        self._known: dict[bytes, tuple[int, Version]] = {}
        """By key: the revision that wrote it last, as far as is known here, and the record's version."""
        self._seen = 0
        """The revision up to which the watch has given everything."""
        self._seen_more = asyncio.Event()
        self._broken = asyncio.Event()
        self._break_reason = ""
        self._catching = asyncio.Lock()
        self._asked = self._caught = self._failed = 0
        self._failure = ""
        """Why the questions up to ``_failed`` have no answer."""
        self._pulses: list[asyncio.Task[None]] = []

    async def open(self, owner: str, address: str) -> None:
        """Raises ConfigError where aetcd cannot be loaded, or files are wrong. An etcd that does not answer is waited
        for meanwhile."""
        self._link.open()
        self._owner, self._address = owner, address
        with contextlib.suppress(CoordinatorUnavailableError):
            await self._renew()
        self._pulses = [asyncio.create_task(self._pulse(act)) for act in (self._renew, self.catch_up)]

    async def close(self) -> None:
        for pulse in self._pulses:
            pulse.cancel()
        await asyncio.gather(*self._pulses, return_exceptions=True)
        lease, self._lease = self._lease, 0
        if lease:
            with contextlib.suppress(CoordinatorUnavailableError):
                await self._link.ask("LeaseStub", "LeaseRevoke", rpc().LeaseRevokeRequest(ID=lease))
        await self._link.close()

    async def next_number(self) -> int:
        async with self._number_lock:
            for _ in range(TRIES):
                stored, revision = self._number_at
                number = self._numbers.above(stored)
                put = rpc().RequestOp(request_put=rpc().PutRequest(key=NUMBER, value=str(number).encode()))
                kept = await self._if_unchanged(NUMBER, revision, put)
                if isinstance(kept, int):
                    self._number_at = (number, kept)
                    return number
                self._number_at = (self._number_in(kept.value), kept.mod_revision) if kept is not None else (0, 0)
        raise CoordinatorUnavailableError(f"the store {self} gives too many numbers at once")

    async def admit_number(self, number: int) -> None:
        self._numbers.admit(number)

    async def put(self, record: MemberRecord) -> None:
        key = AGENTS + record.agent_id.encode()
        if not self._lease:
            await self._renew()
        put = rpc().RequestOp(request_put=rpc().PutRequest(key=key, value=record.to_bytes()))
        revision = await self._change(key, record.version, put)
        if revision:
            self._know(key, revision, record.version)

    async def remove(self, ref: AgentRef, sessions: int) -> None:
        key = AGENTS + ref.agent_id.encode()
        delete = rpc().RequestOp(request_delete_range=rpc().DeleteRangeRequest(key=key))
        if await self._change(key, (ref.incarnation.number, sessions), delete):
            self._known.pop(key, None)

    async def load(self) -> tuple[MemberRecord, ...]:
        answer = await self._range(AGENTS)
        return tuple(self._readable({found.key: found.value for found in answer.kvs}))

    async def check(self) -> None:
        await self.catch_up()

    async def catch_up(self) -> None:
        """Those who ask while one question is on its way share the next one."""
        self._asked += 1
        mine = self._asked
        async with self._catching:
            if self._caught >= mine:
                return
            if self._failed >= mine:
                raise CoordinatorUnavailableError(self._failure)
            all_until_now = self._asked
            try:
                async with asyncio.timeout(CATCH_UP_S):
                    await self._reach_newest()
            except (CoordinatorUnavailableError, TimeoutError) as error:
                reason = str(error) or f"the store {self} does not say within {CATCH_UP_S:g} s what is newest"
                self._break(reason)
                self._failed, self._failure = all_until_now, reason
                raise CoordinatorUnavailableError(reason) from None
            self._caught = all_until_now

    async def watch(self) -> AsyncIterator[StoreChange]:
        self._broken.clear()
        answer = await self._range(PREFIX)
        found = {kv.key: kv.value for kv in answer.kvs}
        for kv in answer.kvs:
            if kv.key == NUMBER:
                self._see_number(kv)
        owners = {_text(key[len(OWNERS) :]): _text(raw) for key, raw in found.items() if key.startswith(OWNERS)}
        self._known.clear()
        records = self._readable({key: raw for key, raw in found.items() if key.startswith(AGENTS)})
        versions = {AGENTS + record.agent_id.encode(): record.version for record in records}
        for kv in answer.kvs:
            if kv.key in versions:
                self._know(kv.key, kv.mod_revision, versions[kv.key])
        self._see(answer.header.revision)
        yield StoreChange(True, dict(owners), tuple(records))
        async for response in self._responses(answer.header.revision + 1):
            yield self._change_in(response, owners)

    def __repr__(self) -> str:
        return repr(self._link)

    def _change_in(self, response: Any, owners: dict[str, str]) -> StoreChange:
        """What one answer of the watch says; keeps ``owners`` and the known revisions up to date."""
        raws: dict[bytes, bytes | None] = {}
        for event in response.events:
            key, is_gone = event.kv.key, event.type == event.DELETE
            if key.startswith(OWNERS):
                owners.pop(_text(key[len(OWNERS) :]), None)
                if not is_gone:
                    owners[_text(key[len(OWNERS) :])] = _text(event.kv.value)
            elif key == NUMBER and not is_gone:
                self._see_number(event.kv)
            elif key.startswith(AGENTS):
                raws[key] = None if is_gone else event.kv.value
                if is_gone and self._known.get(key, (0,))[0] < event.kv.mod_revision:
                    self._known.pop(key, None)
        records = self._readable({key: raw for key, raw in raws.items() if raw is not None})
        revisions = {event.kv.key: event.kv.mod_revision for event in response.events}
        for record in records:
            key = AGENTS + record.agent_id.encode()
            self._know(key, revisions[key], record.version)
        removed = tuple(_text(key[len(AGENTS) :]) for key, raw in raws.items() if raw is None)
        self._see(max(revisions.values()))  # the header's may be of events that are still on their way
        return StoreChange(False, dict(owners), tuple(records), removed)

    async def _responses(self, revision: int) -> AsyncIterator[Any]:
        """The answers of a watch from ``revision`` on; ends where etcd has compacted what comes next, or the connection
        was left for one with other certificates. Raises CoordinatorUnavailableError."""
        call, create = self._link.watch(PREFIX, end_of(PREFIX), revision)
        broken = asyncio.create_task(self._broken.wait())
        try:
            await call.write(create)
            while True:
                read = asyncio.create_task(call.read())
                await asyncio.wait((read, broken), return_when=asyncio.FIRST_COMPLETED)
                if not read.done():
                    read.cancel()
                    await asyncio.gather(read, return_exceptions=True)
                    raise CoordinatorUnavailableError(self._break_reason)
                if read.cancelled():
                    return
                response = read.result()
                if response is grpc.aio.EOF:  # type: ignore[attr-defined]
                    raise CoordinatorUnavailableError(f"the store {self} ended the watch: {await call.details()}")
                if response.canceled:
                    log.warning("the store %s is read anew: %s", self, response.cancel_reason or "compacted")
                    return
                if response.events:
                    yield response
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise CoordinatorUnavailableError(f"the watch of the store {self} broke off: {text_of(error)}") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return  # the call was cancelled and not we: its connection was left
        finally:
            broken.cancel()
            call.cancel()

    async def _pulse(self, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(PULSE_S)
            try:
                await act()
            except CoordinatorUnavailableError as error:
                self._break(str(error))
            except Exception as error:
                log.exception("the store %s: a fault of ours", self)
                self._break(f"the store {self}: {error!r}")

    async def _renew(self) -> None:
        """Stay among the coordinators. Raises CoordinatorUnavailableError."""
        async with self._renewing:
            if self._lease and await self._link.keep_alive(self._lease):
                return
            if self._lease:
                log.warning("the store %s took this coordinator for dead; it is there again", self)
            answer = await self._link.ask("LeaseStub", "LeaseGrant", rpc().LeaseGrantRequest(TTL=self._lease_s))
            key, value = OWNERS + self._owner.encode(), self._address.encode()
            await self._link.ask("KVStub", "Put", rpc().PutRequest(key=key, value=value, lease=answer.ID))
            self._lease = answer.ID

    async def _reach_newest(self) -> None:
        """Wait until the watch has given the newest change that etcd's majority knows of."""
        newest = await self._newest_unseen()
        while self._seen < newest:
            self._seen_more.clear()
            await self._seen_more.wait()

    async def _newest_unseen(self) -> int:
        """The revision of the newest change after what was seen; 0 where there is none."""
        request = rpc().RangeRequest(
            key=AGENTS,
            range_end=end_of(AGENTS),
            min_mod_revision=self._seen + 1,
            sort_target="MOD",
            sort_order="DESCEND",
            limit=1,
            keys_only=True,
        )
        answer = await self._link.ask("KVStub", "Range", request)
        return answer.kvs[0].mod_revision if answer.kvs else 0

    async def _range(self, prefix: bytes) -> Any:
        return await self._link.ask("KVStub", "Range", rpc().RangeRequest(key=prefix, range_end=end_of(prefix)))

    async def _change(self, key: bytes, version: Version, operation: Any) -> int:
        """Do ``operation``, unless the record of ``key`` is newer than ``version``; its revision, or 0."""
        known_revision, known_version = self._known.get(key, (0, (0, 0)))
        for _ in range(TRIES):
            if known_revision and known_version > version:
                return 0
            kept = await self._if_unchanged(key, known_revision, operation)
            if isinstance(kept, int):
                return kept
            known_revision, known_version = (0, (0, 0)) if kept is None else (kept.mod_revision, self._version(kept))
            if kept is None and operation.HasField("request_delete_range"):
                return 0
        raise CoordinatorUnavailableError(f"the store {self} has too many writers of {key.decode(errors='replace')}")

    async def _if_unchanged(self, key: bytes, revision: int, operation: Any) -> Any:
        """Do ``operation`` if ``key`` was last written in ``revision`` (0: is not there), and return the revision of
        that; otherwise return the key and value that are there, or None."""
        compare = rpc().Compare(key=key, target="MOD", result="EQUAL", mod_revision=revision)
        get = rpc().RequestOp(request_range=rpc().RangeRequest(key=key))
        answer = await self._link.ask(
            "KVStub", "Txn", rpc().TxnRequest(compare=[compare], success=[operation], failure=[get])
        )
        if answer.succeeded:
            return int(answer.header.revision)
        found = answer.responses[0].response_range.kvs
        return found[0] if found else None

    def _number_in(self, raw: bytes) -> int:
        """The counter. Raises CoordinatorUnavailableError for bytes that no coordinator wrote."""
        try:
            return int(raw)
        except ValueError:
            name = NUMBER.decode()
            raise CoordinatorUnavailableError(f"the store {self} has no number at {name}, but {raw!r:.100}") from None

    def _see_number(self, found: Any) -> None:
        """What another coordinator gave is believed here, and the next one is above it."""
        with contextlib.suppress(CoordinatorUnavailableError):  # an agent that asks for a number hears of it
            number = self._number_in(found.value)
            self._numbers.stored(number)
            if found.mod_revision > self._number_at[1]:
                self._number_at = (number, found.mod_revision)

    def _version(self, found: Any) -> Version:
        """Of what stands at a key; of what cannot be read, below every version."""
        try:
            return MemberRecord.from_bytes(found.value).version
        except KvxferError:
            return (0, 0)

    def _readable(self, raws: dict[bytes, bytes]) -> list[MemberRecord]:
        records, wrong = readable({_text(key[len(AGENTS) :]): raw for key, raw in raws.items()})
        for agent_id, error in wrong:
            log.error("the store %s: member %r is left out: %s", self, agent_id, error)
        return records

    def _know(self, key: bytes, revision: int, version: Version) -> None:
        if self._known.get(key, (0,))[0] < revision:
            self._known[key] = (revision, version)

    def _see(self, revision: int) -> None:
        self._seen = revision
        self._seen_more.set()

    def _break(self, reason: str) -> None:
        """End the watch: it is not believed any more."""
        self._break_reason = reason
        self._broken.set()


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def end_of(prefix: bytes) -> bytes:
    """The end of the range of all keys that begin with ``prefix``."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
