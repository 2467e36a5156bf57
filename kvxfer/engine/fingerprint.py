"""Fingerprints of a model's config, tokenizer and weights, for the compatibility record.

Decides when two workers' KV blocks mean the same thing. It must never look at where the files lie: the same model in
another directory has the same fingerprints.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
import xxhash

BOOKKEEPING = frozenset(
    {
        "_attn_implementation",
        "_model_name_or_path",
        "_name_or_path",
        "dtype",
        "name_or_path",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Config keys that say nothing about the KV of a token; the dtype is a field of its own in the record."""


PROBE = (
    "The  quick brown fox's 12,345.67 jumps\n\n\tover `x += 1` ALLCAPS_snake "
    "\u00e9t\u00e9 e\u0301te\u0301 \u4f60\u597d \U0001f600 <|im_start|> </s>"
)
"""Text of many kinds: what it becomes shows merges, normaliser and special tokens, whatever version reads the files."""


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 over vocabulary, chat template and the tokens of :data:`PROBE`: 64 hex digits.

    Each side of a transfer tokenises the prompt by itself; two that do it differently would give one prompt's KV to
    another.
    """
    content = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template, tokenizer.encode(PROBE, verbose=False)]
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def config_fingerprint(config: dict[str, Any]) -> str:
    """SHA-256 over the canonical JSON of ``config.json``'s content without paths and versions: 64 hex digits."""
    kept = {key: value for key, value in config.items() if key not in BOOKKEEPING}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def weights_fingerprint(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """XXH3-128 over every tensor's name, dtype, shape and bytes, in the order of the names: 32 hex digits.

    Every byte counts at its own place. What it guards against is a mistake, not an attack: the weights are the
    operator's own. It runs at memory speed, and without the GIL.
    """
    whole = xxhash.xxh3_128()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {content.nbytes}\n".encode())
        whole.update(content.data)
    return whole.hexdigest()
