"""A rank's figures and spans among SGLang 0.5.23's own. Decides which labels they have, and how spans look there."""

from __future__ import annotations

from sglang.srt.runtime_context import get_observability, get_parallel, get_serving

from kvxfer.connectors.sglang.metrics import RankMetrics
from kvxfer.types import Role


def rank_metrics(role: Role) -> RankMetrics | None:
    """Of this process's rank, with the labels of its scheduler's; ``None`` where SGLang was not asked for metrics."""
    if not get_observability().enable_metrics:
        return None
    parallel = get_parallel()
    labels = {
        "model_name": get_serving().served_model_name,
        "engine_type": role.value,
        "tp_rank": parallel.tp_rank,
        "pp_rank": parallel.pp_rank,
        "moe_ep_rank": parallel.moe_ep_rank,
    }
    if parallel.dp_rank is not None:
        labels["dp_rank"] = parallel.dp_rank
    labels |= get_observability().extra_metric_labels or {}
    return RankMetrics({name: str(value) for name, value in labels.items()})
