"""Reads of a rank that do not drain, as far as their owner is told, until a test lets them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kvxfer.agent import Agent, Transfer
from tests.support.sglang_core.cores import Rank


@contextlib.contextmanager
def held_reads(rank: Rank) -> Iterator[Callable[[], None]]:
    """No pull of that rank drains, as far as its owner is told, until the function is called or the block ends."""
    agent, pull, release = rank.core._agent, rank.core._agent.pull, threading.Event()

    def held_pull(*arguments: Any, on_ended: Callable[[Transfer], None], **more: Any) -> Transfer:
        def ended(transfer: Transfer) -> None:
            def tell() -> None:
                release.wait(20)
                rank.core._runtime.call(on_ended, transfer)

            threading.Thread(target=tell, daemon=True).start()

        return pull(*arguments, on_ended=ended, **more)

    agent.pull = held_pull  # type: ignore[method-assign]
    try:
        yield release.set
    finally:
        release.set()
        agent.pull = pull  # type: ignore[method-assign]
        assert isinstance(agent, Agent)
