"""Which streams a change of the membership concerns, and what each of them lacks. Decides whom an update goes to; must
never know a stream's messages, or judge a member.

A watcher is told of every member, and of all by which it places requests. An agent is told what it needs to reach
others: neither loads, nor which members are suspect or draining. It is told of every member while there are few of
them: it then finds every peer even while the coordinator is away. That costs the square of their number, so beyond
``whole_view_max`` members an agent is told of those that it *names*, and of those that name it. What it was told before
stays named, hence its view has no gaps: an absence from a whole snapshot means the same as ever
(``protocol/mirror.py``).
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
        self.names: set[str] | None = None
        """The members that it is told of; ``None``: all."""
        self.known: frozenset[str] = frozenset()
        """The names that it had when it came, and those that it asked for while it was told of all."""
        self.fresh: set[str] = set()
        """Names that were added since the last update."""

    @property
    def agent_id(self) -> str:
        """Empty for a watcher."""
        return self.subject.agent_id

    def close(self, error: KvxferError) -> None:
        """Have the stream end with ``error``; the first one counts."""
        self.close_error = self.close_error or error
        self.wake.set()


class Receivers:
    """All streams of one coordinator."""

    def __init__(self, directory: Directory, whole_view_max: int) -> None:
        self.on_elsewhere: Callable[[str, list[str]], None] = lambda agent_id, others: None
        """Called with an agent that has no session here, and those that named it."""
        self._directory = directory
        self._whole_view_max = whole_view_max
        self.sessions: dict[int, StreamState] = {}
        self.watchers: set[StreamState] = set()
        self._whole: set[StreamState] = set()
        """Sessions that are told of all members."""
        self._naming: dict[str, set[StreamState]] = {}
        """The sessions that each member is told to by its name."""
        self._of: dict[str, StreamState] = {}
        """The newest session of each agent."""
        self._revision = directory.revision
        """The last revision for which watchers were woken."""
        self._contact_revision = directory.contact_revision
        """The last revision for which agents were woken."""

    def __iter__(self) -> Iterator[StreamState]:
        return iter((*self.sessions.values(), *self.watchers))

    def open(self, stream: int, state: StreamState, known: Collection[str]) -> None:
        """A registered agent's stream; ``known``: the members that the agent has in its view."""
        agent_id = state.agent_id
        self.sessions[stream] = self._of[agent_id] = state
        state.known = frozenset(known)
        if len(self._directory) <= self._whole_view_max:
            self._whole.add(state)
            return
        state.names = set()
        for name in (agent_id, *known, *(other.agent_id for other in self._naming.get(agent_id, ()))):
            self._add(state, name)

    def close(self, stream: int) -> None:
        state = self.sessions.pop(stream)
        if self._of.get(state.agent_id) is state:
            del self._of[state.agent_id]
        self._whole.discard(state)
        for name in state.names or ():
            self._forget(name, state)

    def ask(self, state: StreamState, names: Collection[str]) -> None:
        """An agent names others. They are told of it too. Raises OverloadedError beyond NAMES_MAX names that are
        members."""
        if state.names is None:
            state.known |= frozenset(names)
        for name in names:
            self._add(state, name)
            other = self._of.get(name)
            if other is not None:
                self._add(other, state.agent_id)
            elif name in self._directory:
                self.on_elsewhere(name, [state.agent_id])
        if state.names is not None and len(state.names) > NAMES_MAX:
            for name in [name for name in state.names if self._directory.known(name) is None]:
                state.names.discard(name)
                self._forget(name, state)
            if len(state.names) > NAMES_MAX:
                raise OverloadedError(f"an agent is told of at most NAMES_MAX={NAMES_MAX} others by name")

    def acquaint(self, agent_id: str, others: Iterable[str]) -> None:
        """Agents at another coordinator named this one: it is told of them."""
        state = self._of.get(agent_id)
        if state is not None:
            for name in others:
                self._add(state, name)

    def take(self, state: StreamState) -> Change:
        """What a receiver lacks; it counts as told."""
        fresh, state.fresh = state.fresh, set()
        change = self._directory.change_since(
            state.revision,
            with_load=not state.agent_id,
            with_judgement=not state.agent_id,
            names=state.names,
            fresh=fresh,
        )
        state.revision = state.told_revision = change.revision
        return change

    def wake(self) -> None:
        """The directory may have changed: wake the streams that lack something."""
        if self._directory.contact_revision != self._contact_revision:
            self._narrow()
            for state in self._whole:
                state.wake.set()
            if self._naming:
                for agent_id in self._directory.ids_since(self._contact_revision):
                    naming = self._naming.get(agent_id, ())
                    for state in naming:
                        state.wake.set()
                    if naming and agent_id not in self._of and agent_id in self._directory:
                        self.on_elsewhere(agent_id, [state.agent_id for state in naming])
            self._contact_revision = self._directory.contact_revision
        if self._directory.revision != self._revision:
            self._revision = self._directory.revision
            for state in self.watchers:
                state.wake.set()

    def _narrow(self) -> None:
        """Tell agents by name from now on, if there are too many members for everything."""
        if self._whole and len(self._directory) > self._whole_view_max:
            for state in self._whole:
                names = state.known.union(self._directory, (state.agent_id,))
                if state.revision is not None:
                    names |= self._directory.ids_since(state.revision)  # what ended meanwhile
                state.names = set()
                for name in names:
                    self._add(state, name, is_fresh=False)
            self._whole.clear()

    def _add(self, state: StreamState, name: str, *, is_fresh: bool = True) -> None:
        if state.names is None or name in state.names:
            return
        state.names.add(name)
        self._naming.setdefault(name, set()).add(state)
        if is_fresh:
            state.fresh.add(name)
            state.wake.set()

    def _forget(self, name: str, state: StreamState) -> None:
        naming = self._naming[name]
        naming.discard(state)
        if not naming:
            del self._naming[name]
