"""One source and readers of one prompt without time, threads or sockets: over the grant table that decides in
production, in whatever order their messages come.

A reader is a generator that yields where something of another may come first, and ends with its outcome: "committed",
or the code of what it was refused with. It says what `loads` says, in that order.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvxfer._native import _core
from kvxfer.connectors.common.ids import DIRECT, part_id
from kvxfer.connectors.vllm.source import PromptSource
from kvxfer.connectors.vllm.stage import StageLayers
from kvxfer.connectors.vllm.wire import Ask, Keep, Message, PartReady, Refuse, Release, decode
from kvxfer.types import GrantState, TransferId
from tests.support.vllm_connector.pair import BLOCKS, LAYERS, OPTIONS, PAGE, Pages, finish_order, new_id, stores_of

NOW, TTL = 1, 10**12
WAIT: TypeAlias = Callable[[], bool]
"""What a reader waits for; ``None``: only for its turn."""
Script: TypeAlias = Generator[WAIT | None, None, str]
FINISHED = (3, 4, 9)


class TableGrant:
    """As kvxfer.agent.Grant, over a bare table."""

    def __init__(self, agent: TableAgent, transfer_id: TransferId) -> None:
        self.agent = agent
        self.transfer_id = transfer_id
        self.ended: Callable[[GrantState], None] | None = None

    @property
    def state(self) -> GrantState:
        return GrantState(int(self.agent.table.state(self.transfer_id.raw, NOW) or 0))

    @property
    def bound(self) -> str | None:
        return self.bind("")

    def bind(self, reader: str) -> str | None:
        return self.agent.table.bind(self.transfer_id.raw, reader, NOW) or None

    def ready(self, blocks: int, *, layers: int = 0, complete: bool = False) -> None:
        self.agent.see(self.agent.table.ready(self.transfer_id.raw, blocks, layers, complete, NOW))

    def revoke(self, reason: str = "") -> GrantState:
        state, effects = self.agent.table.end(self.transfer_id.raw, _core.GrantEvent.REVOKE, NOW)
        self.agent.see(effects)
        return GrantState(int(state))

    def on_ended(self, callback: Callable[[GrantState], None]) -> None:
        self.ended = callback


class TableAgent:
    """As kvxfer.agent.Agent, as far as a source uses it."""

    def __init__(self, pages: Pages) -> None:
        self.table = _core.GrantTable(_core.GrantLimits())
        self.ledgers = [
            _core.Ledger(_core.PoolInfo(index, store.page_count, PAGE, bytes(32), True))
            for index, store in enumerate(pages.stores)
        ]
        self.grants: dict[bytes, TableGrant] = {}
        self.answers: dict[tuple[int, bytes], Any] = {}
        """The last that was said to a reader's session of a transfer."""
        self.told: dict[str, list[Message]] = {}
        self.over: collections.deque[tuple[TableGrant, GrantState]] = collections.deque()

    def members(self) -> tuple[()]:
        return ()

    def notify(self, agent_id: str, payload: bytes) -> None:
        self.told.setdefault(agent_id, []).append(decode(payload))

    def grant(
        self,
        pool: int,
        blocks: npt.NDArray[np.uint32],
        *,
        transfer_id: TransferId,
        reader: str | None,
        ttl_s: float,
        content_digest: bytes,
    ) -> TableGrant:
        grant = self.grants[transfer_id.raw] = TableGrant(self, transfer_id)
        ledger = self.ledgers[pool]
        self.see(
            self.table.grant(transfer_id.raw, ledger, blocks.tolist(), reader or "", TTL // 10**4, NOW, content_digest)
        )
        return grant

    def abort_grant(self, transfer_id: TransferId) -> None:
        self.see(self.table.abort_grant(transfer_id.raw))

    def see(self, effects: Sequence[Any]) -> None:
        for effect in effects:
            if isinstance(effect, _core.SendFrame) and not isinstance(effect.frame, _core.Queued):
                self.answers[effect.session, effect.frame.id] = effect.frame
            elif isinstance(effect, _core.GrantEnded):
                self.over.append((self.grants[effect.id], GrantState(int(effect.state))))

    def turn(self) -> None:
        """What the loop of the source's agent does soon: tell the holders of a grant that it ended."""
        while self.over:
            grant, state = self.over.popleft()
            if grant.ended is not None:
                grant.ended(state)


class Table:
    """The source under test, which keeps one prompt once :meth:`finish` was called."""

    def __init__(self, stores: int = 2, rank: int = 0) -> None:
        pages = Pages(
            tuple(f"layer {layer}" for layer in range(LAYERS)),
            PAGE,
            stores_of(np.zeros((LAYERS, BLOCKS, PAGE), np.uint8), stores),
        )
        self.pages = pages
        self.agent = TableAgent(pages)
        self.freed: list[str] = []
        self.source = PromptSource(
            self.agent,  # type: ignore[arg-type]
            tuple(range(stores)),  # type: ignore[arg-type]
            pages,
            OPTIONS,
            rank,
            StageLayers.whole(LAYERS),
            lambda function, *arguments: function(*arguments),
            self.freed.append,
        )

    def finish(self, reader: str | None = None) -> None:
        self.source.begin_step(finish_order(FINISHED, reader))

    def finishing(self) -> Script:
        """:meth:`finish` as something that has its turn."""
        self.finish()
        return "finished"
        yield None


class Reader:
    """One reading engine of one rank."""

    def __init__(self, table: Table, name: str, number: int) -> None:
        self.table, self.agent = table, table.agent
        self.name, self.number = name, number
        self.ref = _core.AgentRef(name, number, bytes([number]) * 16)
        self.heard = 0
        self.nonces = itertools.count(1)

    def __repr__(self) -> str:
        return self.name

    def say(self, message: Message) -> None:
        self.table.source.on_message(self.name, message)

    def keep(self) -> Script:
        self.say(Keep((new_id(),)))
        yield None
        return "kept"

    def quit(self) -> Script:
        """The request ends before its turn came."""
        yield from self.keep()
        self.say(Release(new_id(), 0, 1))
        return "quit"

    def die(self) -> Script:
        """It pulls one storage and is gone."""
        first = self.pull(DIRECT, 0)
        yield from self.wait(first)
        self.agent.see(self.agent.table.reader_dead(self.ref, NOW))
        return "dead"

    def direct(self) -> Script:
        """It pulls what was granted as a whole, and asks where that fails."""
        ids = []
        for index in range(len(self.table.pages.stores)):
            ids.append(self.pull(DIRECT, index))
            yield None
        for id_ in ids:
            yield from self.wait(id_)
        if all(isinstance(self.agent.answers[self.number, id_], _core.Ready) for id_ in ids):
            code = yield from self.commit(ids)
            if not code:
                return "committed"
        for id_ in ids:
            yield from self.give_back(id_)
        return (yield from self.ask())

    def ask(self) -> Script:
        """It has the beginning of the prompt in its cache, or was refused."""
        self.say(Ask(new_id(), 0, 0, 1, 0, 0, LAYERS, is_early=True))
        told = self.agent.told.setdefault(self.name, [])
        yield lambda: len(told) > 0
        code = ""
        message = told[0]
        assert isinstance(message, (PartReady, Refuse))
        if isinstance(message, Refuse):
            code = message.code
        else:
            ids = []
            for index in range(len(self.table.pages.stores)):
                ids.append(self.pull(message.part, index))
                yield None
            for id_ in ids:
                yield from self.wait(id_)
            code = yield from self.commit(ids)
        self.say(Release(new_id(), 0, 1))
        return code or "committed"

    # --- one transfer ---

    def pull(self, part: int, index: int) -> bytes:
        id_ = part_id(new_id(), 0, 0, part, index).raw
        count = len(FINISHED) * self.table.pages.stores[index].layers
        frame = _core.Pull(id_, 1, 1, _core.Lane.MEMORY, 0, count, PAGE, bytes(32), 60_000)
        self.agent.see(self.agent.table.on_pull(self.number, self.ref, frame, NOW))
        return id_

    def wait(self, id_: bytes) -> Generator[WAIT | None, None, None]:
        def has_answer() -> bool:
            answer = self.agent.answers.get((self.number, id_))
            return answer is not None and (not isinstance(answer, _core.Ready) or answer.complete)

        yield has_answer

    def commit(self, ids: list[bytes]) -> Generator[WAIT | None, None, str]:
        """The first code that is no verdict ``ok``; empty where all are."""
        code = ""
        for id_ in ids:
            confirm = _core.Confirm(id_, next(self.nonces))
            self.agent.see(self.agent.table.on_confirm(self.number, self.ref, confirm, NOW))
            verdict = self.agent.answers[self.number, id_]
            code = code or ("" if verdict.code.name == "ok" else verdict.code.name)
            yield None
            yield from self.give_back(id_)
        return code

    def give_back(self, id_: bytes) -> Generator[WAIT | None, None, None]:
        self.agent.see(self.agent.table.on_release(self.ref, id_, NOW))
        yield None


def run(table: Table, scripts: Sequence[Script], order: Sequence[int]) -> list[str]:
    """What becomes of each where their turns come in that ``order``, and the rest of them one by one."""
    outcomes = [""] * len(scripts)
    waiting: list[WAIT | None] = [None] * len(scripts)

    def turn(index: int) -> bool:
        wait = waiting[index]
        if outcomes[index] or (wait is not None and not wait()):
            return False
        try:
            waiting[index] = next(scripts[index])
        except StopIteration as end:
            outcomes[index] = end.value
        table.agent.turn()
        return True

    for index in order:
        turn(index)
    while not all(outcomes):
        turns = [turn(index) for index in range(len(scripts))]
        assert any(turns), f"all wait: {outcomes}"
    return outcomes


def interleavings(lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every order of so many turns each."""
    if not any(lengths):
        yield ()
    for index, length in enumerate(lengths):
        if length:
            rest = [*lengths[:index], length - 1, *lengths[index + 1 :]]
            yield from ((index, *order) for order in interleavings(rest))
