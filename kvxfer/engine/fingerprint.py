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

COLUMNS = 512
SAMPLES = 64
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
    """SHA-256 over every tensor's name, dtype, shape and content summary: 64 hex digits.

    The summary of a tensor covers each of its bytes once, in 512 column sums of its 64-bit words (exact, modulo
    2**64), and adds 64 words taken at even distances with their places. One changed value anywhere changes it;
    what could escape is values moved along a column and nowhere near a sample. It runs at memory speed.
    """
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        words = flat[: len(flat) // 8 * 8].view(torch.int64)
        rows = words[: len(words) // COLUMNS * COLUMNS].view(-1, COLUMNS)
        places = torch.linspace(0, max(len(words) - 1, 0), SAMPLES, dtype=torch.float64).long().to(words.device)
        parts = [rows.sum(0), words[rows.numel() :], words[places] if len(words) else words, flat[len(words) * 8 :]]
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        for part in parts:
            whole.update(part.cpu().numpy().tobytes())
    return whole.hexdigest()
