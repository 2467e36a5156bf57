"""What a coordinator keeps beyond its own end: the counter of incarnations, a record of each member, and which other
coordinators there are. Decides which of two records is newer; must never know how one is kept, or judge a member.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from kvxfer._pb import control_pb2 as pb
from kvxfer.errors import InvalidArgumentError, KvxferError, ProtocolError, RefusedError
from kvxfer.rpc import convert
from kvxfer.types import AgentRef, Load, Member

AHEAD_MAX = 1 << 45
"""How far above the counter the number of a returning agent may lie: about a year of microseconds. No coordinator of
this cluster ever gave a higher one.
"""
OWNER_BYTES_MAX = 64

Version = tuple[int, int]
"""Of what is known of an agent id: the incarnation's number, and how many sessions it began. The higher one is
newer."""


@dataclasses.dataclass(frozen=True)
class MemberRecord:
    """One member as the coordinator that holds its stream last wrote it, without its load."""

    owner: str
    """The name of that coordinator."""
    sessions: int
    member: Member

    @property
    def agent_id(self) -> str:
        return self.member.ref.agent_id

    @property
    def version(self) -> Version:
        return (self.member.ref.incarnation.number, self.sessions)

    def to_bytes(self) -> bytes:
        """Raises InvalidArgumentError for an owner that no store takes."""
        if not 0 < len(self.owner.encode()) <= OWNER_BYTES_MAX:
            raise InvalidArgumentError(
                f"a coordinator's name has 1 to {OWNER_BYTES_MAX} bytes, not {self.owner!r:.100}"
            )
        member = dataclasses.replace(self.member, load=Load())
        message = pb.StoredMember(
            owner=self.owner, sessions=self.sessions, member=convert.write_member(member, session_key=b"")
        )
        return message.SerializeToString()

    @classmethod
    def from_bytes(cls, raw: bytes) -> MemberRecord:
        """Raises ProtocolError for bytes that are no record."""
        message = pb.StoredMember()
        try:
            message.ParseFromString(raw)
        except Exception:
            raise ProtocolError("bytes in the store that are no record of a member") from None
        if not 0 < len(message.owner.encode()) <= OWNER_BYTES_MAX or message.member.session_key:
            raise ProtocolError("a record in the store that no coordinator wrote")
        return cls(message.owner, message.sessions, convert.read_member(message.member))


@dataclasses.dataclass(frozen=True)
class StoreChange:
    """What a watcher lacks. Whole: ``records`` are all there are. Otherwise ``records`` are new or changed, and
    ``removed`` the agent ids whose record was taken away. ``owners``: all coordinators that are alive now, by name,
    with the address at which the others reach each; empty where they do not."""

    is_whole: bool
    owners: Mapping[str, str]
    records: tuple[MemberRecord, ...] = ()
    removed: tuple[str, ...] = ()


class Store(Protocol):
    """Asynchronous, because a durable or shared one has to wait for a disk or a quorum.

    Every call but :meth:`admit_number` raises CoordinatorUnavailableError, whose text names the store and the cause,
    where the store cannot be had now.
    """

    is_shared: bool
    """Whether other coordinators read and write it too."""

    async def open(self, owner: str, address: str) -> None:
        """Begin, as the coordinator of that name, which the others reach at ``address``.

        Raises ConfigError for a store that can never be used as it is."""
        ...

    async def close(self) -> None:
        """Leave: a shared store forgets this coordinator at once, and no record. Callable twice."""
        ...

    async def next_number(self) -> int:
        """A number above every one that was ever given or admitted."""
        ...

    async def admit_number(self, number: int) -> None:
        """Stay above a number that a live agent shows. Raises RefusedError for one that no coordinator can have
        given. Admits it where the store cannot be had."""
        ...

    async def put(self, record: MemberRecord) -> None:
        """Keep a record, unless a newer one of its agent id is there."""
        ...

    async def remove(self, ref: AgentRef, sessions: int) -> None:
        """Take the record of an agent id away, unless it is newer than this."""
        ...

    async def load(self) -> tuple[MemberRecord, ...]:
        """All records."""
        ...

    def watch(self) -> AsyncIterator[StoreChange]:
        """A whole change first, then what changes. Where the watch breaks or falls behind it begins anew with a whole
        one. Raises CoordinatorUnavailableError; may then be called again. Never yields
        where no other coordinator writes."""
        ...

    async def check(self) -> None:
        """Return if the store can be read and written now. Raises CoordinatorUnavailableError."""
        ...

    async def catch_up(self) -> None:
        """Return once the watcher was given everything that was written before this call. Raises
        CoordinatorUnavailableError where that cannot be had in time; the watch then begins anew."""
        ...


class NumberLine:
    """The counter of a store: above the clock at its start, above all that it gave, above all that it was shown."""

    def __init__(self, wall_clock_us: int) -> None:
        """``wall_clock_us``: microseconds since 1970, read once by the caller."""
        self.last = wall_clock_us
        self._shown_max = wall_clock_us + AHEAD_MAX
        """No number that is shown raises it: an agent could raise it again and again."""

    def stored(self, number: int) -> None:
        """The store has ``number``: a coordinator gave it."""
        self.last = max(self.last, number)
        self._shown_max = max(self._shown_max, number)

    def above(self, stored: int) -> int:
        """The next number, where the store has ``stored`` as its last one."""
        self.stored(max(self.last, stored) + 1)
        return self.last

    def admit(self, number: int) -> bool:
        """Whether ``number`` raises the counter. Raises RefusedError for one that no coordinator can have given."""
        if number > self._shown_max:
            raise RefusedError(
                f"incarnation number {number} is far above every number of this cluster; was the coordinator's clock "
                "more than a year behind when it started?"
            )
        is_higher = number > self.last
        self.last = max(self.last, number)
        return is_higher


def readable(raws: dict[str, bytes]) -> tuple[list[MemberRecord], list[tuple[str, KvxferError]]]:
    """The records among ``raws`` (by agent id), and what is wrong with the others, which no coordinator can use."""
    records: list[MemberRecord] = []
    wrong: list[tuple[str, KvxferError]] = []
    for agent_id, raw in raws.items():
        try:
            record = MemberRecord.from_bytes(raw)
            if record.agent_id != agent_id:
                raise ProtocolError(f"the record of {record.agent_id!r} stands in another's place")
            records.append(record)
        except KvxferError as error:
            wrong.append((agent_id, error))
    return records, wrong
