"""A scheduler half, and as much of vLLM's scheduler as it sees."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from kvxfer.connectors.vllm.groups import KvGroups
from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.connectors.vllm.scheduler import SchedulerHalf
from kvxfer.connectors.vllm.steps import StepOrders
from kvxfer.types import TransferId

BLOCK = 16
ID = TransferId(bytes(range(16)))
OPTIONS = ConnectorOptions.from_config("kv_both", "me", {"coordinator": "127.0.0.1:1"})
PREFILL = {"do_remote_decode": True}


class Status(enum.Enum):
    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6


@dataclasses.dataclass(eq=False)
class Request:
    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None
    status: Status = Status.WAITING
    trace_headers: dict[str, str] | None = None
    lora_request: Any = None
    mm_features: list[Any] = dataclasses.field(default_factory=list)
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


def new_half(
    weights_why: Callable[[], str | None] = lambda: None,
    adapters: Mapping[str, str] | None = None,
    *,
    will_fail: bool = False,
) -> SchedulerHalf:
    """``adapters``: fingerprints of LoRA adapters by their paths."""
    count = iter(range(1, 1 << 16))
    mint = lambda: TransferId(next(count).to_bytes(16, "big"))  # noqa: E731
    agents = ("me", "me.1")
    return SchedulerHalf(
        OPTIONS,
        groups=KvGroups.plain(BLOCK),
        agents=agents,
        mint=mint,
        adapter_fingerprint=lambda adapter: (adapters or {}).get(adapter.lora_path, f"of {adapter.lora_path}"),
        weights_why=weights_why,
        adapter_was_another=lambda adapter: bool(getattr(adapter, "was_another", False)),
        will_fail=will_fail,
    )


def step(
    half: SchedulerHalf,
    new: dict[str, Any] | None = None,
    cached: dict[str, Any] | None = None,
    resumed: set[str] | None = None,
) -> StepOrders:
    """One step; ``new`` and ``cached``: request id -> (blocks, computed before, scheduled)."""
    new, cached = new or {}, cached or {}
    return half.build(
        SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, block_ids=(list(blocks),), num_computed_tokens=computed)
                for name, (blocks, computed, _) in new.items()
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(cached),
                resumed_req_ids=resumed or set(),
                new_block_ids=[(list(blocks),) if blocks else None for blocks, _, _ in cached.values()],
                num_computed_tokens=[computed for _, computed, _ in cached.values()],
            ),
            num_scheduled_tokens={name: count for name, (_, _, count) in {**new, **cached}.items()},
            total_num_scheduled_tokens=sum(count for _, _, count in {**new, **cached}.values()),
        )
    )


def concurrent(half_role: str) -> dict[str, Any]:
    ends = {"source": {"agent_id": "p"}, "destination": {"agent_id": "d"}}
    return {f"do_remote_{half_role}": True, "transfer_id": str(ID), **ends}
