"""What a leg answers beside, or in place of, text: vLLM's transfer parameters, kvxfer's usage, timings and report.

Decides field names, and how far a lie is from the truth.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.mock_engine.faults import MockFault
from kvxfer.mock_engine.generation import MockGeneration
from kvxfer.mock_engine.holds import KvHold
from kvxfer.mock_engine.legs import EngineLeg


class ToldNumbers:
    """What an answer tells of its cached tokens and durations: the truth, or what the fault ``lie`` says."""

    __slots__ = ("_lie",)

    def __init__(self, lie: MockFault | None) -> None:
        self._lie = lie

    def cached(self, tokens: int) -> int:
        """In place of ``tokens`` cached ones."""
        if self._lie is None:
            return tokens
        if self._lie.cached_tokens is not None:
            return self._lie.cached_tokens
        return round(tokens * self._lie.cached_factor)

    def seconds(self, seconds: float) -> float:
        """In place of a duration of ``seconds``."""
        return seconds if self._lie is None else round(seconds * self._lie.time_factor, 6)


def nixl_params(hold: KvHold, engine_id: str, host: str, port: int, told: ToldNumbers) -> dict[str, Any]:
    """``kv_transfer_params`` of an answer, as vLLM's NixlConnector 0.32 gives them."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(hold.block_ids)],
        "remote_engine_id": engine_id,
        "remote_request_id": hold.key.removeprefix("nixl:"),
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": hold.tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": told.cached(hold.generations[0].sequence.cached_tokens),
    }


@dataclasses.dataclass(slots=True)
class LegTimes:
    """Of one leg, in seconds by the event loop's clock; None: it has not happened."""

    arrived_s: float
    granted_s: float | None = None
    """When the prefill engine had all of the KV."""
    room_s: float | None = None
    """When there were blocks for it."""
    loaded_s: float | None = None
    first_s: float | None = None
    """The first token."""

    def until(self, at_s: float | None) -> float:
        """How long after its arrival; 0 for what has not happened."""
        return 0.0 if at_s is None else round(max(0.0, at_s - self.arrived_s), 6)


def prefilled_body(
    generation: MockGeneration,
    model: str,
    request_id: str,
    leg: EngineLeg,
    times: LegTimes,
    now_s: float,
    told: ToldNumbers,
) -> dict[str, Any]:
    """The body with which kvxfer's own engine answers a prefill leg."""
    queue_s = times.until(generation.began_s)
    sequence = generation.sequence
    return {
        "object": "kvxfer.prefill",
        "id": request_id,
        "model": model,
        "usage": {"prompt_tokens": sequence.prompt_tokens, "cached_tokens": told.cached(sequence.cached_tokens)},
        "timings": {
            "queue_s": told.seconds(queue_s),
            "prefill_s": told.seconds(round(times.until(now_s) - queue_s, 6)),
            "ended_unix_s": time.time(),
        },
        "transfer_id": leg.keys[0].partition(":")[2],
    }


def decode_report(
    generation: MockGeneration,
    leg: EngineLeg,
    blocks: int,
    times: LegTimes,
    now_s: float,
    failure: KvxferError | None,
    told: ToldNumbers,
) -> dict[str, Any]:
    """The ``kvxfer`` object of a decode leg's answer. All of its transfer is ``wire``."""
    is_remote = failure is None
    seconds: dict[str, float] = {}
    if is_remote:
        wire_s = round(times.until(times.loaded_s) - times.until(times.room_s), 6)
        seconds = {"queue": times.until(times.granted_s), "plan": 0.0, "wire": wire_s, "confirm": 0.0}
    return {
        "transfer_id": leg.keys[0].partition(":")[2],
        "prefill": "remote" if is_remote else "local",
        "reason": "remote" if is_remote else str(failure),
        "blocks_moved": blocks if is_remote else 0,
        "bytes_moved": 0,
        "lane": "mock" if is_remote else None,
        "seconds": {name: told.seconds(value) for name, value in seconds.items()},
        "failure": None if failure is None else failure.code,
        "ttft_s": told.seconds(times.until(times.first_s)),
        "queue_s": told.seconds(times.until(generation.began_s)),
        "total_s": told.seconds(times.until(now_s)),
        "ended_unix_s": time.time(),
    }
