"""The two ends of a request's answer: tokens into text on the engine thread, events out on the event loop.

It decides where an answer ends (end of sequence, stop string, length) and which text is certain enough to send. It
must never know of blocks, batches or HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

import torch

from kvxfer.engine.detokenizer import Detokenizer
from kvxfer.engine.request import Delta, Event, Outcome, PrefillOutcome, Sequence
from kvxfer.engine.sampling import Sampler, SamplingParams
from kvxfer.engine.stop import StopChecker
from kvxfer.errors import KvxferError


class Output:
    """Turns one request's logits into tokens and text. Engine thread only."""

    def __init__(self, params: SamplingParams, detokenizer: Detokenizer, eos_ids: frozenset[int]) -> None:
        self._params = params
        self._sampler = Sampler(params)
        self._detokenizer = detokenizer
        self._stop = StopChecker(params.stop)
        self._eos_ids = frozenset() if params.ignore_eos else eos_ids

    def push(self, sequence: Sequence, logits: torch.Tensor) -> Delta:
        """Draw the next token from ``logits`` [vocab], append it to the sequence, say what that adds to the answer."""
        token = self._sampler.sample(logits)
        sequence.tokens.append(token)
        is_full = len(sequence.tokens) - sequence.prompt_tokens >= self._params.max_tokens
        if token in self._eos_ids:
            text, reason = self._flush(), "stop"
        else:
            text, reason = self._stop.push(self._detokenizer.push(token)), "length" if is_full else ""
            if self._stop.stopped is None and is_full:
                text += self._flush()
        if self._stop.stopped is not None:
            reason = "stop"
        return Delta(text, (token,), reason or None)

    def _flush(self) -> str:
        """The text held back by the detokenizer and by the stop strings."""
        text = self._stop.push(self._detokenizer.flush())
        return text + self._stop.flush() if self._stop.stopped is None else text


class Generation:
    """An answer in the making, on the event loop: iterate for its :class:`Delta`; afterwards ``outcome`` is there.

    An async context manager: leaving it before the last event aborts the request. The iterator raises the KvxferError
    that ended the request.
    """

    def __init__(self, sequence: Sequence, on_abort: Callable[[Sequence], None]) -> None:
        self._sequence = sequence
        self._on_abort = on_abort
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._is_over = False
        self._outcome: Outcome | PrefillOutcome | None = None

    def __repr__(self) -> str:
        return f"<Generation {self._sequence.request.request_id}{' over' if self._is_over else ''}>"

    @property
    def request_id(self) -> str:
        return self._sequence.request.request_id

    @property
    def outcome(self) -> Outcome:
        """What the finished request says of itself; raise KvxferError before the end."""
        if not isinstance(self._outcome, Outcome):
            raise KvxferError(f"request {self.request_id} has no outcome yet")
        return self._outcome

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._is_over:
            event = await self._next()
            if isinstance(event, Delta):
                return event
        raise StopAsyncIteration

    async def wait_prefilled(self) -> PrefillOutcome:
        """The outcome of a prefill leg."""
        while not self._is_over:
            await self._next()
        if not isinstance(self._outcome, PrefillOutcome):
            raise KvxferError(f"request {self.request_id} is not a prefill leg")
        return self._outcome

    def abort(self) -> None:
        """End the request and give its blocks back; without effect once its last event was taken."""
        if not self._is_over:
            self._is_over = True
            self._on_abort(self._sequence)

    def put(self, event: Event) -> None:
        """Deliver an event; called on the loop."""
        self._events.put_nowait(event)

    async def _next(self) -> Event:
        event = await self._events.get()
        if isinstance(event, KvxferError):
            self._is_over = True
            raise event
        if not isinstance(event, Delta):
            self._is_over = True
            self._outcome = event
        return event
