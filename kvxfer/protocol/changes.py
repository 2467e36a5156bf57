"""The members of a directory by the revision in which they last changed, and the incarnations that ended since. Decides
what a receiver at a revision lacks; must never know why a member changed.

Each change gives a member the next revision and the last place in the order. So what is newer than a revision is found
from the newest on, in time in proportion to what changed and not to the number of members.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterator

from kvxfer.protocol.membership import Change, MemberState
from kvxfer.types import AgentRef, Member


@dataclasses.dataclass
class Entry:
    """One member, and how its directory judges it."""

    member: Member
    state: MemberState
    stream: int | None
    revision: int
    load_revision: int
    sessions: int = 0
    contact_revision: int = 0
    """The last revision in which something changed that other agents need to reach it."""

    @property
    def version(self) -> tuple[int, int]:
        return (self.member.ref.incarnation.number, self.sessions)


class ChangeLog:
    """The entries of a directory in the order of their changes."""

    def __init__(self, epoch: bytes, first_revision: int, gone_max: int) -> None:
        """``gone_max`` bounds the log of ended incarnations."""
        self.epoch = epoch
        self.revision = first_revision
        self.shape_revision = first_revision
        """The last revision in which something changed besides a member's load."""
        self.contact_revision = first_revision
        """The last revision in which something changed besides loads, and whether members are suspect or draining."""
        self.entries: collections.OrderedDict[str, Entry] = collections.OrderedDict()
        """By agent id, least recently changed first."""
        self._loaded: collections.OrderedDict[str, Entry] = collections.OrderedDict()
        """Those whose load ever changed, by agent id, the last change last."""
        self._gone: collections.deque[tuple[int, AgentRef]] = collections.deque(maxlen=gone_max)
        self._gone_since = first_revision
        """The log of ended incarnations is complete from this revision on; an older receiver needs a whole snapshot."""

    def step(self) -> int:
        """Begin the next revision, which is of the shape; returns it."""
        self.revision += 1
        self.shape_revision = self.contact_revision = self.revision
        return self.revision

    def touch(self, entry: Entry, *, is_contact: bool = True) -> None:
        """Give an entry the next revision, and the last place in the order of changes. Without ``is_contact`` only
        whether it is suspect or draining changed."""
        self.revision += 1
        entry.revision = self.shape_revision = self.revision
        if is_contact:
            entry.contact_revision = self.contact_revision = self.revision
        self.entries.move_to_end(entry.member.ref.agent_id)

    def touch_load(self, entry: Entry) -> None:
        """Only the load of an entry changed."""
        self.revision += 1
        entry.load_revision = self.revision
        agent_id = _id(entry)
        self._loaded[agent_id] = entry
        self._loaded.move_to_end(agent_id)

    def remove(self, entry: Entry) -> None:
        """The incarnation ended."""
        ref = entry.member.ref
        del self.entries[ref.agent_id]
        self._loaded.pop(ref.agent_id, None)
        revision = self.step()
        if len(self._gone) == self._gone.maxlen:
            self._gone_since = self._gone[0][0]
        self._gone.append((revision, ref))

    def since(
        self,
        revision: int | None,
        *,
        is_settled: bool,
        with_load: bool = False,
        with_judgement: bool = True,
        names: Collection[str] | None = None,
        fresh: Collection[str] = (),
    ) -> Change:
        """What a receiver at ``revision`` of this epoch lacks; ``None`` is a new receiver.

        A new load is a change by itself only ``with_load``; that a member is suspect or draining now, or no longer,
        only ``with_judgement``. ``names``: the only agent ids that the receiver is told of; ``fresh``: those of them
        that it was not told of before.
        """
        if revision is None or revision < self._gone_since:
            present = self.entries.values()
            if names is not None:
                present = [self.entries[name] for name in names if name in self.entries]  # type: ignore[assignment]
            return self._change(True, is_settled, [entry.member for entry in present])
        newer = self._newer(revision, names)
        changed = [entry.member for entry in newer if with_judgement or entry.contact_revision > revision]
        if with_load:
            loaded = itertools.takewhile(lambda entry: entry.load_revision > revision, reversed(self._loaded.values()))
            changed += [entry.member for entry in loaded if entry.revision <= revision]
        for name in fresh:
            entry = self.entries.get(name)
            if entry is not None and max(entry.revision * with_judgement, entry.contact_revision) <= revision:
                changed.append(entry.member)
        gone = [ref for ref in self._gone_after(revision) if names is None or ref.agent_id in names]
        return self._change(False, is_settled, changed, tuple(reversed(gone)))

    def ids_since(self, revision: int) -> set[str]:
        """The agent ids of all that ended or whose contact changed after ``revision``, as far as the log goes back."""
        newer = self._newer(revision, None)
        return {_id(entry) for entry in newer if entry.contact_revision > revision} | {
            ref.agent_id for ref in self._gone_after(revision)
        }

    def knows_end_of(self, ref: AgentRef) -> bool:
        """Whether an incarnation ended here, as far as the log goes back."""
        return any(ref == ended for _, ended in self._gone)

    def _newer(self, revision: int, names: Collection[str] | None) -> Iterator[Entry]:
        """What changed, by whichever is the shorter way: all changes, or all names."""
        if names is not None and len(names) < self.shape_revision - revision:
            named = (self.entries[name] for name in names if name in self.entries)
            return (entry for entry in named if entry.revision > revision)
        newer = itertools.takewhile(lambda entry: entry.revision > revision, reversed(self.entries.values()))
        return newer if names is None else (entry for entry in newer if _id(entry) in names)

    def _gone_after(self, revision: int) -> Iterator[AgentRef]:
        return (ref for _, ref in itertools.takewhile(lambda ended: ended[0] > revision, reversed(self._gone)))

    def _change(
        self, is_whole: bool, is_settled: bool, members: list[Member], gone: tuple[AgentRef, ...] = ()
    ) -> Change:
        members.sort(key=lambda member: member.ref)
        return Change(self.epoch, self.revision, is_whole, is_settled, tuple(members), gone)


def _id(entry: Entry) -> str:
    return entry.member.ref.agent_id
