"""How a vLLM engine divides its model among ranks: which layers each pipeline stage keeps, and which rank this is.

Decides which divisions kvxfer moves; the others are refused by name. Reads vLLM's configuration objects by attribute;
imports vLLM only to ask which layers a stage has.
"""

from __future__ import annotations

from typing import Any

from kvxfer.connectors.vllm.groups import KvGroups
from kvxfer.connectors.vllm.pages import Pages
from kvxfer.connectors.vllm.shares import EngineShape, shape_of, stages_of
from kvxfer.errors import ConfigError
from kvxfer.types import STAGES


def check_parallel(vllm_config: Any, groups: KvGroups, connector_base: type[Any]) -> None:
    """Raise ConfigError unless each rank keeps all tokens of its layers, of some heads, and ``connector_base``, vLLM's
    class of connectors, tells stages apart."""
    parallel = vllm_config.parallel_config
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise ConfigError(f"kvxfer does not move the KV cache of engines with {name} {size} yet; it must be 1")
    size = parallel.pipeline_parallel_size
    if size == 1:
        return
    if not hasattr(connector_base, "set_xfer_handshake_metadata_pp_aware"):
        raise ConfigError(
            f"this version of vLLM does not tell a connector of pipeline_parallel_size {size} which stage an agent is "
            "of: 0.32 and newer do"
        )
    if not groups.is_plain:
        raise ConfigError(
            f"kvxfer does not move the KV cache of engines with pipeline_parallel_size {size} yet where layers have "
            "several KV groups, windows or states; it must be 1"
        )
    if getattr(vllm_config, "speculative_config", None) is not None:
        raise ConfigError(
            f"kvxfer does not move the KV cache of engines with pipeline_parallel_size {size} that decode "
            "speculatively yet; it must be 1"
        )


def ranks_of(parallel_config: Any) -> int:
    """The ranks of one engine, each of which has an agent."""
    return int(parallel_config.pipeline_parallel_size) * int(parallel_config.tensor_parallel_size)


def stages_text(vllm_config: Any) -> str:
    """At which layers the engine's pipeline stages end, as :func:`.shares.stages_of` reads it. Raises ConfigError for
    more than a request can say."""
    count = int(vllm_config.parallel_config.pipeline_parallel_size)
    if count == 1:
        return ""
    from vllm.distributed.utils import get_pp_indices

    layers = int(vllm_config.model_config.get_total_num_hidden_layers())
    text = ",".join(str(get_pp_indices(layers, stage, count)[1]) for stage in range(count))
    if not STAGES.fullmatch(text):
        raise ConfigError(f"kvxfer does not move the KV cache of engines with {count} pipeline stages: {text}")
    return text


def this_rank() -> int:
    """The number of this worker's rank, as :mod:`.shares` counts: tensor ranks of the first stage, then the next."""
    from vllm.distributed import parallel_state

    stage = parallel_state.get_pp_group().rank_in_group
    tensor_ranks = parallel_state.get_tensor_model_parallel_world_size()
    return int(stage * tensor_ranks + parallel_state.get_tensor_model_parallel_rank())


def total_heads(vllm_config: Any) -> int:
    """KV heads of a layer of the whole model; a latent is one that every rank keeps."""
    model = vllm_config.model_config
    return 1 if getattr(model, "use_mla", False) else int(model.get_total_num_kv_heads())


def engine_shape(ranks: int, stages: str, rank: int, pages: Pages) -> EngineShape:
    """Of an engine of so many ranks, of which rank ``rank`` has these pages. Raises ConfigError where not every layer
    of its stage keeps KV of its own: then layers have no common numbers."""
    layers = int(stages.rpartition(",")[2]) if stages else len(pages.layers)
    shape = shape_of(ranks, stages_of(stages, layers))
    kept = shape.layers_of(rank)
    if len(kept) != len(pages.layers):
        raise ConfigError(
            f"kvxfer does not move the KV cache of engines with pipeline stages yet where {len(kept)} layers of a "
            f"stage keep {len(pages.layers)} caches"
        )
    return shape
