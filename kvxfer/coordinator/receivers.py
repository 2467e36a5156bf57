"""Which streams a change of the membership concerns, and what each of them lacks. Decides whom an update goes to; must
never know a stream's messages, or judge a member.

A watcher is told of every member, and of all by which it places requests. An agent is told what it needs to reach
others: neither loads, nor which members are suspect or draining. While there are at most ``whole_view_max`` members it
is told of each: it then finds every peer even while the coordinator is away. That costs the square of their number, so
with more members an agent is told of those that it *names*. Naming has two ends: an agent that is named is told of the
one that named it, wherever its session is, because it must know who dials it.

What an agent was told once stays named, hence its view has no gaps: an absence from a whole snapshot means the same as
ever (``protocol/mirror.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator

from kvxfer.coordinator.gate import Caller
from kvxfer.errors import KvxferError, OverloadedError
from kvxfer.protocol.directory import Change, Directory
from kvxfer.protocol.pace import ToldPace
from kvxfer.rpc.convert import NAMES_MAX
from kvxfer.trust.permissions import NO_SUBJECT, Subject


class StreamState:
    """What one stream still has to be told, as state: never a queue."""

    def __init__(self, caller: Caller, subject: Subject = NO_SUBJECT) -> None:
        self.caller = caller
        self.subject = subject
        """Whose session it is; of a watcher it is nobody's."""
        self.wake = asyncio.Event()
        self.urgent = asyncio.Event()
        """There is more to say than what changed."""
        self.writing = asyncio.Lock()
        """Held while a message is on its way."""
        self.drain_reason: str | None = None
        self.close_error: KvxferError | None = None
        self.is_stopping = False
        self.leg_period = 0
        """Whose leg keys it was given."""
        self.pace: ToldPace | None = None
        """What an agent was told last of its heartbeats; ``None`` for a watcher."""
        self.revision: int | None = None
        """The receiver lacks nothing of this revision."""
        self.told_revision = 0
        """The revision that it was told last."""
        self.names: set[str] = set()
        """Its own, those that it was told of or is to be told of by name, and those that it asked for."""
        self.names_max = NAMES_MAX
        """With more names, those of no member are dropped."""
        self.fresh: set[str] = set()
        """Names that were added since the last update."""

    @property
    def agent_id(self) -> str:
        """Empty for a watcher."""
        return self.subject.agent_id

    def close(self, error: KvxferError) -> None:
        """Have the stream end with ``error``; the first one counts."""
        self.close_error = self.close_error or error
        self.hurry()

    def hurry(self) -> None:
        """Have the stream say at once what there is to say."""
        self.urgent.set()
        self.wake.set()


class Receivers:
    """All streams of one coordinator."""

    def __init__(self, directory: Directory, whole_view_max: int) -> None:
        self.on_elsewhere: Callable[[str, Iterable[str]], None] = lambda agent_id, others: None
        """Called with a member that has no session here, and agents here that named it."""
        self._directory = directory
        self._whole_view_max = whole_view_max
        self._is_whole = len(directory) <= whole_view_max
        """Whether agents are told of all members now."""
        self.sessions: dict[int, StreamState] = {}
        self.watchers: set[StreamState] = set()
        self._naming: dict[str, set[StreamState]] = {}
        """The sessions that have each name."""
        self._of: dict[str, StreamState] = {}
        """The newest session of each agent."""
        self.absent: dict[str, tuple[Caller, Subject]] = {}
        """Whose the last session was of each member that had one here and has none now."""
        self._revision = directory.revision
        """The last revision for which watchers were woken."""
        self._contact_revision = directory.contact_revision
        """The last revision for which agents were woken."""

    def __iter__(self) -> Iterator[StreamState]:
        return iter((*self.sessions.values(), *self.watchers))

    def __contains__(self, agent_id: str) -> bool:
        """Whether an agent has a session here."""
        return agent_id in self._of

    def is_told_of(self, agent_id: str, name: str) -> bool:
        """Whether an agent has a session here and is told, or was, of one of that name."""
        state = self._of.get(agent_id)
        return state is not None and (self._is_whole or name in state.names)

    def open(self, stream: int, state: StreamState, known: Collection[str]) -> None:
        """A registered agent's stream. ``known``: the members in the agent's view, and those that it asked for."""
        agent_id = state.agent_id
        self.sessions[stream] = self._of[agent_id] = state
        self.absent.pop(agent_id, None)
        for name in (agent_id, *known, *(other.agent_id for other in self._naming.get(agent_id, ()))):
            self._introduce(state, name)

    def retire(self, stream: int, error: KvxferError) -> None:
        """A stream speaks for its agent no more and is to end with ``error``: the agent has no session here now."""
        state = self.sessions.get(stream)
        if state is not None:
            state.close(error)
            if self._of.get(state.agent_id) is state:
                del self._of[state.agent_id]

    def close(self, stream: int) -> None:
        """A stream has ended."""
        state = self.sessions.pop(stream)
        if self._of.get(state.agent_id) is state:
            del self._of[state.agent_id]
            if state.agent_id in self._directory:
                self.absent[state.agent_id] = state.caller, state.subject
        for name in state.names:
            self._forget(name, state)

    def ask(self, state: StreamState, names: Iterable[str]) -> None:
        """An agent names others. Raises OverloadedError beyond NAMES_MAX names that are members."""
        for name in names:
            self._introduce(state, name)
        if len(state.names) > NAMES_MAX:
            self._drop_absent(state)
            if len(state.names) > NAMES_MAX:
                raise OverloadedError(f"an agent is told of at most NAMES_MAX={NAMES_MAX} others by name")

    def acquaint(self, agent_id: str, others: Iterable[str]) -> bool:
        """Agents at another coordinator named this one. False if it has no session here."""
        state = self._of.get(agent_id)
        if state is None:
            return False
        for name in others:
            self._introduce(state, name)
        return True

    def take(self, state: StreamState) -> Change:
        """What a receiver lacks; it counts as told."""
        fresh, state.fresh = state.fresh, set()
        is_watcher = not state.agent_id
        change = self._directory.change_since(
            state.revision,
            with_load=is_watcher,
            with_judgement=is_watcher,
            names=None if is_watcher or self._is_whole else state.names,
            fresh=fresh,
        )
        state.revision = state.told_revision = change.revision
        return change

    def wake(self) -> None:
        """The directory may have changed: wake the streams that lack something."""
        if self._directory.contact_revision != self._contact_revision:
            changed = self._directory.ids_since(self._contact_revision)
            was_whole, self._is_whole = self._is_whole, len(self._directory) <= self._whole_view_max
            if was_whole and not self._is_whole:
                self._narrow()
            elif self._is_whole and not was_whole:
                self._widen()
            if was_whole or self._is_whole:
                for state in self.sessions.values():
                    state.wake.set()
            self._wake_naming(changed)
            for gone in [agent_id for agent_id in changed if agent_id not in self._directory]:
                self.absent.pop(gone, None)
            self._contact_revision = self._directory.contact_revision
        if self._directory.revision != self._revision:
            self._revision = self._directory.revision
            for state in self.watchers:
                state.wake.set()

    def _wake_naming(self, changed: Iterable[str]) -> None:
        for agent_id in changed:
            naming = self._naming.get(agent_id)
            if naming:
                for state in naming:
                    state.wake.set()
                if not self._is_whole and self._is_elsewhere(agent_id):
                    self.on_elsewhere(agent_id, [state.agent_id for state in naming])

    def _narrow(self) -> None:
        """Agents are told by name from now on: of all that they were told of, and of all that are here now."""
        elsewhere = [name for name in self._directory if self._is_elsewhere(name)]
        for state in self.sessions.values():
            names = set(self._directory)
            if state.revision is not None:
                names |= self._directory.ids_since(state.revision)  # what ended meanwhile
            for name in names:
                self._name(state, name, is_told=True)
        for name in elsewhere:
            self.on_elsewhere(name, [state.agent_id for state in self.sessions.values()])

    def _widen(self) -> None:
        """Agents are told of all members from now on."""
        for state in self.sessions.values():
            state.fresh.update(name for name in self._directory if name not in state.names)

    def _is_elsewhere(self, name: str) -> bool:
        return name not in self._of and name in self._directory

    def _introduce(self, state: StreamState, name: str) -> None:
        """An agent names another one: both are told of the other. Also where the other one named it first, elsewhere:
        that one may have moved since, and been told nothing."""
        is_new = self._name(state, name, is_told=self._is_whole)
        if not is_new or self._is_whole or name == state.agent_id:
            return
        other = self._of.get(name)
        if other is not None:
            self._name(other, state.agent_id)
        elif name in self._directory:
            self.on_elsewhere(name, (state.agent_id,))

    def _name(self, state: StreamState, name: str, *, is_told: bool = False) -> bool:
        """Add a name; returns whether it is new. ``is_told``: the agent is told of it anyway, if it is a member."""
        if name in state.names:
            return False
        if len(state.names) >= state.names_max:
            self._drop_absent(state)
            state.names_max = max(NAMES_MAX, 2 * len(state.names))
        state.names.add(name)
        self._naming.setdefault(name, set()).add(state)
        if not is_told:
            state.fresh.add(name)
            state.wake.set()
        return True

    def _drop_absent(self, state: StreamState) -> None:
        """Forget names of no member, unless their end is still to be told."""
        untold = set() if state.revision is None else self._directory.ids_since(state.revision)
        for name in [name for name in state.names if name not in self._directory and name not in untold]:
            state.names.discard(name)
            self._forget(name, state)

    def _forget(self, name: str, state: StreamState) -> None:
        naming = self._naming[name]
        naming.discard(state)
        if not naming:
            del self._naming[name]
