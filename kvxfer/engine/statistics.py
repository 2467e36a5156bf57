"""The worker's counts at ``/statistics``: one JSON object. Reads, decides nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from kvxfer.engine.executor import Executor
from kvxfer.types import WorkerInfo


class HasStatistics(Protocol):
    """An agent, as far as this page needs it."""

    def statistics(self) -> Any: ...


def worker_statistics(info: WorkerInfo, executor: Executor, agent: HasStatistics | None) -> dict[str, Any]:
    """``{"agent_id", "role", "model", "pool", "engine", "agent"}``; counts of blocks, requests and tokens.

    ``reserved``, ``granted`` and ``quarantined`` are the agent's view of blocks that the engine counts as used.
    """
    blocks = executor.pool.statistics()
    known: Mapping[str, Any] = agent.statistics().as_dict() if agent is not None else {}
    held = held_blocks(known)
    return {
        "agent_id": info.agent_id,
        "role": str(info.role),
        "model": info.model,
        "pool": {
            "blocks_total": blocks.total,
            "block_tokens": executor.pool.block_tokens,
            "block_bytes": executor.runner.block_bytes,
            "free": blocks.free,
            "cached": blocks.cached,
            "used": blocks.used,
            **held,
        },
        "engine": {
            **dataclasses.asdict(executor.scheduler.statistics()),
            "steps": executor.counters.steps,
            "prefill_tokens": executor.counters.prefill_tokens,
            "decode_tokens": executor.counters.decode_tokens,
            "cache_hit_blocks": blocks.hit_blocks,
            "revoked_prompts": executor.counters.revoked_prompts,
            "requests": {f"{leg}/{code}": count for (leg, code), count in executor.counters.requests.copy().items()},
            "transfer_failures": executor.counters.remote_failures.copy(),
        },
        "agent": dict(known),
    }


def held_blocks(statistics: Mapping[str, Any]) -> dict[str, int]:
    """The agent's blocks by state, over all its pools."""
    pools = statistics.get("pools", ())
    return {state: sum(int(pool[state]) for pool in pools) for state in ("reserved", "granted", "quarantined")}
