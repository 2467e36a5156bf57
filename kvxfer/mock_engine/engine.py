"""One mock engine: its clock, its blocks, what it holds for readers, its faults and its counts.

Decides what the engine is (role, kind, limits) and builds its parts. It must never know sockets: ``http_protocol``
gives it requests, and ``server`` its port.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

from kvxfer.mock_engine.choice import ChoiceText
from kvxfer.mock_engine.claims import KvClaims
from kvxfer.mock_engine.exchange import MockExchange
from kvxfer.mock_engine.faults import FaultTable, MockFault
from kvxfer.mock_engine.generation import EnginePace, MockGeneration
from kvxfer.mock_engine.holds import KvHolds
from kvxfer.mock_engine.kv_events import KvEvents
from kvxfer.mock_engine.legs import EngineLeg, LegDialect
from kvxfer.mock_engine.options import EngineKind, MockEngineOptions, PaceKind
from kvxfer.mock_engine.pace import FixedPace
from kvxfer.mock_engine.shape import to_json
from kvxfer.mock_engine.statistics import EngineCounts, EngineTimes
from kvxfer.mock_engine.step_loop import StepLoop
from kvxfer.mock_engine.tokens import block_keys
from kvxfer.openai.errors import RequestError, error_body, status_for


class MockEngine:
    """Made on the running loop, once its port is known."""

    def __init__(self, options: MockEngineOptions, index: int, port: int, claims: KvClaims) -> None:
        self.options = options
        self.port = port
        self.role = options.role_of(index)
        self.bootstrap_port = options.bootstrap_port and options.bootstrap_port + index
        """Of SGLang's bootstrap server; 0: the HTTP port serves."""
        self.engine_id = str(uuid.uuid4())
        """Another one each time: an engine that replaces this one at its address is not this one."""
        self.counts = EngineCounts()
        self.times = EngineTimes()
        self.faults = FaultTable(options.seed + index)
        self.claims = claims
        self.events = self._made_events(index)
        self.pace: EnginePace = self._made_pace()
        self.holds = KvHolds(options.kv_lease_s, self.pace.stop)
        self.exchanges: set[MockExchange] = set()
        self.readers: set[asyncio.Task[None]] = set()
        """Claims of other processes that wait for a prefill here."""
        self.recorded: deque[dict[str, Any]] = deque(maxlen=options.record)
        self.connections = 0
        """Open connections."""
        self.on_down: list[Callable[[MockFault], None]] = []
        """What closes the engine's ports."""
        self._is_cached = options.pace is PaceKind.STEPS and options.prefix_caching
        self.most_tokens = options.max_model_len
        if options.pace is PaceKind.STEPS:
            self.most_tokens = min(self.most_tokens, options.blocks * options.block_size)

    def _made_events(self, index: int) -> KvEvents | None:
        options = self.options
        if not options.kv_events_port:
            return None
        replay = options.kv_events_replay_port and options.kv_events_replay_port + index
        return KvEvents(
            options.host,
            options.kv_events_port + index,
            replay,
            options.kv_events_topic,
            options.block_size,
            options.kv_events_format,
            options.blocks,
        )

    def _made_pace(self) -> EnginePace:
        options = self.options
        if options.pace is PaceKind.FIXED:
            return FixedPace(options.ttft_ms / 1e3, options.itl_ms / 1e3, options.block_size)
        publish = self.events.publish if self.events is not None else None
        return StepLoop(options.limits, options.cost, options.speed, publish)

    def keys_for(self, choice: ChoiceText, salt: str) -> list[int]:
        """The keys of the blocks of a sequence; none if its prefix is not cached."""
        if not self._is_cached:
            return []
        packed = choice.prompt.packed + choice.packed_ids()
        keys = block_keys(packed, self.options.block_size, salt)
        if self.events is not None:
            self.events.know(keys, packed)
        return keys

    def block_ids(self, generations: list[MockGeneration]) -> tuple[int, ...]:
        """The blocks that hold the prompts of ``generations``; at a fixed pace, numbers that stand for them."""
        found: list[int] = []
        for generation in generations:
            count = -(-generation.sequence.prompt_tokens // self.options.block_size)
            first = generation.choice.prompt.seed % self.options.blocks
            made = [(first + index) % self.options.blocks for index in range(count)]
            found += generation.sequence.blocks[:count] or made
        return tuple(found)

    def transfer_s(self, tokens: int) -> float:
        """How long KV of so many tokens takes to come."""
        return self.options.transfer_ms / 1e3 + self.options.transfer_token_us / 1e6 * tokens

    def error_bytes(self, error: BaseException, leg: EngineLeg) -> tuple[int, bytes]:
        """Status and body of an error, in the words of the engine that this one stands for."""
        status = status_for(error)
        kind = self.options.kind
        if kind is EngineKind.KVXFER or (kind is EngineKind.ANY and leg.dialect is LegDialect.KVXFER):
            return status, to_json(error_body(error))
        param = error.param if isinstance(error, RequestError) else None
        name = "BadRequestError" if status == 400 else "NotFoundError" if status == 404 else "InternalServerError"
        body = {"message": str(error), "type": name, "param": param, "code": status}
        if kind is EngineKind.SGLANG:
            return status, to_json({"object": "error", **body})
        return status, to_json({"error": body})

    def ended(self, exchange: MockExchange) -> None:
        """The request is over, whatever its end."""
        self.exchanges.discard(exchange)

    def down(self, fault: MockFault) -> None:
        """Close every port and connection, for ``delay_s`` or for good."""
        for close in self.on_down:
            close(fault)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, and say so."""
        self.pace.forget_prefixes()
        if self.events is not None:
            self.events.cleared()

    def close(self) -> None:
        """End everything at once."""
        for exchange in list(self.exchanges):
            exchange.client_left()
        self.holds.close()
        self.pace.close()
        if self.events is not None:
            self.events.close()

    def statistics(self) -> dict[str, Any]:
        """What ``/mock/statistics`` shows."""
        pace, holds, counts = self.pace, self.holds, self.counts
        return {
            "port": self.port,
            "role": self.role,
            "kind": self.options.kind,
            "engine_id": self.engine_id,
            "running": pace.running,
            "waiting": pace.waiting,
            "open_requests": len(self.exchanges),
            "connections": self.connections,
            "blocks": self.options.blocks,
            "blocks_used": pace.used_blocks,
            "blocks_held": pace.held_blocks,
            "holds": len(holds),
            "holds_made": holds.counts.held,
            "holds_released": holds.counts.released,
            "holds_expired": holds.counts.expired,
            "blocks_released": holds.counts.blocks_released,
            "blocks_expired": holds.counts.blocks_expired,
            "requests": counts.requests,
            "refused": counts.refused,
            "finished": counts.finished,
            "failed": counts.failed,
            "clients_left": counts.clients_left,
            "prompt_tokens_computed": pace.counts.prompt_computed,
            "prompt_tokens_cached": pace.counts.cache_hit,
            "prompt_tokens_loaded": pace.counts.loaded,
            "generation_tokens": pace.counts.output,
            "preemptions": pace.counts.preemptions,
            "steps": pace.counts.steps,
            "late_steps": pace.late_steps if isinstance(pace, StepLoop) else 0,
            "load_failures": counts.load_failures,
            "recomputes": counts.recomputes,
            "silent_recomputes": counts.silent_recomputes,
            "faults": self.faults.taken,
        }
