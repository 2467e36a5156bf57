"""The API keys of one router in several processes: the leader reads their file, and tells the others what it says.

So all have the same keys, also one that begins while the file is broken. Decides which seat of the shared memory a
limited holder has, and how full its buckets are in a process that begins: as full as the leader's. A key itself is
never told, only its SHA-256. It must never know what a limit means.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from kvxfer.policy.keylimits import KeyLimits, SharedMeter
from kvxfer.router.auth import ApiKeys
from kvxfer.router.group.channel import Channel
from kvxfer.router.group.key_cells import KeyCells, LimitUse, SeatUse
from kvxfer.router.group.messages import NO_SEAT, KeyAccount, KeysTold, LimitLevel
from kvxfer.router.group.plain import from_plain, to_plain
from kvxfer.router.group.seats import Seats
from kvxfer.router.group.segment import KEY_SEATS, SharedCounts
from kvxfer.router.keyed import KeyHolder
from kvxfer.router.keyfile import KeyEntry

Identity = tuple[str, tuple[bytes, ...]]


@dataclasses.dataclass
class _Told:
    """A member that asked for the keys."""

    channel: Channel
    applied: int = 0


class LeadingKeys:
    """The leader's. ``keys`` follow the file; what changes there is told."""

    def __init__(
        self, keys: ApiKeys, segment: SharedCounts, row: int, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.cells = KeyCells(segment, row)
        self._keys = keys
        self._segment = segment
        self._now = now
        self._version = 0
        self._seats: Seats[Identity] = Seats(KEY_SEATS)
        self._uses: dict[Identity, SeatUse] = {}
        self._members: dict[int, _Told] = {}
        keys.share(self._use_of)
        keys.on_change = self._changed

    def join(self, row: int, channel: Channel) -> None:
        """A member asks for the keys, and is told of all changes from now on."""
        self._members[row] = _Told(channel)
        channel.send("keys", to_plain(self._account()))

    def leave(self, row: int) -> None:
        """A member has ended."""
        self._members.pop(row, None)

    def applied(self, row: int, version: int) -> None:
        if row in self._members:
            self._members[row].applied = version

    def _use_of(self, entry: KeyEntry) -> SharedMeter | None:
        if entry.limits == KeyLimits():
            return None
        identity = KeyHolder.identity_of(entry)
        seat = self._seats.take(identity)
        if seat == NO_SEAT:
            return None
        use = self._uses.get(identity)
        if use is None:
            use = self._uses[identity] = self.cells.seat(seat)
        return use

    def _changed(self) -> None:
        self._version += 1
        limited = {KeyHolder.identity_of(entry) for entry in self._keys.entries if entry.limits != KeyLimits()}
        for identity in [identity for identity in self._uses if identity not in limited]:
            self.cells.leave(self._uses.pop(identity))
            self._seats.leave(identity, self._version)
        applied = min((member.applied for member in self._members.values()), default=self._version)
        self._seats.freed(applied, self._segment.key_inflight)
        told = to_plain(self._account())
        for member in self._members.values():
            member.channel.send("keys", told)

    def _account(self) -> KeysTold:
        lists = dict.fromkeys(entry.models for entry in self._keys.entries if entry.models is not None)
        places = {models: place for place, models in enumerate(lists)}
        now_s = self._now()
        holders = tuple(self._account_of(entry, places, now_s) for entry in self._keys.entries)
        return KeysTold(self._version, tuple(places), holders)

    def _account_of(self, entry: KeyEntry, places: dict[frozenset[str], int], now_s: float) -> KeyAccount:
        models = -1 if entry.models is None else places[entry.models]
        bare = dataclasses.replace(entry, models=None)
        use = self._uses.get(KeyHolder.identity_of(entry))
        if use is None or use.meter is None:
            return KeyAccount(bare, models)
        requests, tokens = use.meter.levels(now_s)
        levels = _level(requests, now_s, use.requests), _level(tokens, now_s, use.tokens)
        return KeyAccount(bare, models, use.seat, *levels)


def _level(level: float | None, now_s: float, use: LimitUse) -> LimitLevel | None:
    return None if level is None else LimitLevel(level, now_s, use.seen)


class FollowingKeys:
    """A member's: ``keys`` are those that the leader tells."""

    def __init__(self, segment: SharedCounts, row: int, *, now: Callable[[], float] = time.monotonic) -> None:
        self.keys = ApiKeys(now=now)
        self.cells = KeyCells(segment, row)
        self._uses: dict[Identity, SeatUse] = {}
        self.keys.share(self._use_of)

    def apply(self, plain: object) -> int:
        """Take what the leader says. Returns its version."""
        told = from_plain(KeysTold, plain)
        accounts = {KeyHolder.identity_of(account.entry): account for account in told.holders}
        for identity, use in list(self._uses.items()):
            if identity not in accounts or accounts[identity].seat != use.seat:
                self.cells.leave(self._uses.pop(identity))
        for identity, account in accounts.items():
            if account.seat != NO_SEAT:
                use = self._uses.get(identity) or self.cells.seat(account.seat)
                self._uses[identity] = use
                _tell(use.requests, account.requests)
                _tell(use.tokens, account.tokens)
        self.keys.replace(_entry(account, told.models) for account in told.holders)
        return told.version

    def _use_of(self, entry: KeyEntry) -> SharedMeter | None:
        return self._uses.get(KeyHolder.identity_of(entry))


def _entry(account: KeyAccount, lists: tuple[frozenset[str], ...]) -> KeyEntry:
    return account.entry if account.models < 0 else dataclasses.replace(account.entry, models=lists[account.models])


def _tell(use: LimitUse, level: LimitLevel | None) -> None:
    if level is not None:
        use.tell(level.level, level.at_s, level.seen)
