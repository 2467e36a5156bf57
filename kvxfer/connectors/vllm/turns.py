"""Whose turn it is in vLLM's queue where blocks are short: requests that would begin, or loads that are over.

vLLM looks at waiting requests in their order and stops at the first that gets no blocks. Before 0.31 it stops also
before a request behind it that has blocks, and whose load is over: that one never runs, and nothing is ever freed. The
order comes about whenever a request was passed over ("ask again later") while a later one began its load. So after a
step in which a request got no blocks while loads hold some, one step begins nothing: vLLM passes over all that hold
nothing, and runs the loads that are over. The step after it is as any other, so that no request waits longer for a turn
than one step.
"""

from __future__ import annotations

from collections.abc import Iterable


class Turns:
    """Of one engine's scheduler half."""

    def __init__(self) -> None:
        self._offered: set[str] = set()
        """Requests that vLLM looked at in this step and gave no blocks."""
        self._holding: set[str] = set()
        """Requests that have blocks and have not run since: their prompts are loaded, or were."""
        self.is_for_loads = False
        """Whether this step is for loads that are over, and nothing begins."""

    def asked(self, request_id: str) -> None:
        """vLLM asks what of the request can be loaded: it holds no blocks, or none any more."""
        self._holding.discard(request_id)

    def offered(self, request_id: str) -> None:
        """vLLM was answered, and gives the request blocks now, or has none."""
        self._offered.add(request_id)

    def given(self, request_id: str) -> None:
        """It has blocks. If it does not run in this step, its prompt is loaded, by whatever connector."""
        self._offered.discard(request_id)
        self._holding.add(request_id)

    def gone(self, request_id: str) -> None:
        """It is over."""
        self._holding.discard(request_id)

    def end_step(self, ran: Iterable[str]) -> bool:
        """The step is decided, and these requests run in it. Returns whether one has no blocks that wants some."""
        self._holding.difference_update(ran)
        lacks_blocks = bool(self._offered) or self.is_for_loads
        self.is_for_loads = bool(self._offered and self._holding)
        self._offered.clear()
        return lacks_blocks
