"""Tiny random models of the kinds whose layers keep different KV caches, written as checkpoints that vLLM loads.

Decides their shapes, and what of each kind a test must know: its groups of layers, its window, how vLLM is started for
it. Weights are drawn wide (``initializer_range``), so that a wrong byte of KV changes the tokens. Knows nothing of
kvxfer.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

VOCAB = 512
WINDOW = 64
"""Tokens of a sliding window, and of a chunk of chunked local attention."""
LONGEST = 1024
"""Tokens of a prompt and its answer."""
INITIALIZER_RANGE = 0.2


@dataclasses.dataclass(frozen=True)
class HybridKind:
    """One kind of model. ``groups``: for each KV cache group that vLLM makes of it, sorted, the class of its cache and
    its number of layers."""

    name: str
    config: Mapping[str, Any]
    groups: tuple[tuple[str, int], ...]
    dtype: str = "float32"
    block_tokens: int = 32
    constants: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What weights with these names are filled with: so that a token far back matters too."""
    factors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What weights with these names are multiplied with, for the same."""
    blocks: int = 512
    is_repeatable: bool = True
    """Whether one engine of vLLM, without any connector, decodes what it prefills. DeepSeek's does not on CPU in
    bfloat16: the next token of these models was the same in 5 of 56 cases. So of it only bytes prove something."""
    full_block_tokens: int = 32
    """Of the group of full attention, which vLLM makes as large as a state."""
    attention_backend: str | None = None
    """Where vLLM would choose another one on a processor with AMX, of other block sizes."""

    @property
    def engine(self) -> dict[str, Any]:
        """What each of vLLM's engines is started with."""
        return {
            "dtype": self.dtype,
            "block_size": self.block_tokens,
            "skip_tokenizer_init": True,
            "max_model_len": LONGEST,
            "num_gpu_blocks_override": self.blocks,
            "disable_hybrid_kv_cache_manager": False,
            "attention_backend": self.attention_backend,
        }


_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": LONGEST,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
_SLIDING, _CHUNKED, _FULL = "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "FullAttentionSpec"
_STATE, _LATENT = "MambaSpec", "MLAAttentionSpec"

KINDS: dict[str, HybridKind] = {
    kind.name: kind
    for kind in (
        HybridKind(
            "gemma3",
            {
                "architectures": ["Gemma3ForCausalLM"],
                "model_type": "gemma3_text",
                "sliding_window": WINDOW,
                "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
                "query_pre_attn_scalar": 16,
                "hidden_activation": "gelu_pytorch_tanh",
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
            },
            ((_FULL, 1), *((_SLIDING, 1),) * 5),
            factors={"embed_tokens.weight": 0.1},  # it is the output's too: a token would follow itself for ever
        ),
        HybridKind(
            "mistral",
            {
                "architectures": ["MistralForCausalLM"],
                "model_type": "mistral",
                "sliding_window": WINDOW,
                "rope_theta": 1e4,
            },
            ((_SLIDING, 6),),
        ),
        HybridKind(
            "gptoss",
            {
                "architectures": ["GptOssForCausalLM"],
                "model_type": "gpt_oss",
                "sliding_window": WINDOW,
                "layer_types": ["sliding_attention", "full_attention"] * 3,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "rope_theta": 150000.0,
                "swiglu_limit": 7.0,
            },
            ((_FULL, 3), (_SLIDING, 3)),
        ),
        HybridKind(
            "llama4",
            {
                "architectures": ["Llama4ForCausalLM"],
                "model_type": "llama4_text",
                "attention_chunk_size": WINDOW,
                "no_rope_layers": [1, 1, 1, 0, 1, 1],
                "intermediate_size_mlp": 128,
                "num_local_experts": 2,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 1,
                "rope_theta": 5e5,
            },
            (*((_CHUNKED, 1),) * 5, (_FULL, 1)),
            factors={"self_attn.o_proj.weight": 3.0},
        ),
        HybridKind(
            "qwen3next",
            {
                "architectures": ["Qwen3NextForCausalLM"],
                "model_type": "qwen3_next",
                "layer_types": ["linear_attention"] * 3 + ["full_attention"],
                "num_hidden_layers": 4,
                "linear_num_value_heads": 4,
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 64,
                "linear_value_head_dim": 64,
                "linear_conv_kernel_dim": 4,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 32,
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            },
            ((_FULL, 1), *((_STATE, 1),) * 3),
            dtype="bfloat16",
            constants={"linear_attn.A_log": -5.0, "self_attn.q_norm.weight": 1.5},
            blocks=128,
            full_block_tokens=288,
        ),
        HybridKind(
            "deepseek",
            {
                "architectures": ["DeepseekV2ForCausalLM"],
                "model_type": "deepseek_v2",
                "num_hidden_layers": 3,
                "kv_lora_rank": 512,
                "q_lora_rank": None,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 64,
                "v_head_dim": 16,
                "n_routed_experts": 2,
                "num_experts_per_tok": 1,
                "n_shared_experts": 1,
                "moe_intermediate_size": 32,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 3,
                "moe_layer_freq": 1,
                "rope_theta": 1e4,
            },
            ((_LATENT, 3),),
            dtype="bfloat16",
            block_tokens=16,
            full_block_tokens=16,
            is_repeatable=False,
            attention_backend="CPU_MLA",
        ),
    )
}


def make_hybrid_model(kind: HybridKind, path: pathlib.Path, *, seed: int = 1234) -> pathlib.Path:
    """Write the checkpoint to ``path`` (made if missing) and return it: equal arguments give equal weights."""
    import torch
    import transformers

    values = {**_BASE, **kind.config, "initializer_range": INITIALIZER_RANGE}
    kind_of_model = str(values.pop("model_type"))
    config = transformers.AutoConfig.for_model(kind_of_model, **values, dtype=kind.dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, kind.dtype))
        for name, value in model.named_parameters():
            for ending, constant in kind.constants.items():
                if name.endswith(ending):
                    value.data.fill_(constant)
            for ending, factor in kind.factors.items():
                if name.endswith(ending):
                    value.data.mul_(factor)
    path.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(path)
    # What vLLM reads is the config above, and not what this version of transformers makes of it.
    written = {**values, "model_type": kind_of_model, "torch_dtype": kind.dtype}
    (path / "config.json").write_text(json.dumps(written))
    return path
