"""The forward pass over the paged KV pool.

Decides how the tokens of one step run through the model's own modules and which bytes of the pool they write: the KV of
exactly the positions named, nothing else. It must never know which blocks belong to which request, nor of requests or
transfers. Not for use by two threads at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvxfer.engine.attention import PagedLayout, plan_attention
from kvxfer.engine.model import LoadedModel
from kvxfer.errors import InvalidArgumentError

DEFAULT_BLOCK_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence: their KV, at positions ``start ..``, is written through ``block_table``.

    ``block_table[i]`` is the pool block of positions ``i * block_tokens ..``; the table covers the chunk and all before
    it, and the KV of all positions before ``start`` is there. ``need_logits`` asks for the logits after the last token.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    need_logits: bool

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class Runner:
    """Runs a model over a pool of ``block_count`` blocks of ``block_tokens`` tokens.

    ``storage``: contiguous uint8 [block_count, block_bytes] on the model's device, or None to allocate it here. It is
    seen as the model's dtype, [block_count, layers, 2, kv_heads, block_tokens, head_dim]: a block is one run of bytes.
    """

    def __init__(
        self,
        model: LoadedModel,
        storage: torch.Tensor | None = None,
        *,
        block_count: int,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
    ) -> None:
        self.model = model
        self.block_count = block_count
        self.block_tokens = block_tokens
        self.block_bytes = model.block_bytes(block_tokens)
        if storage is None:
            storage = torch.zeros(block_count, self.block_bytes, dtype=torch.uint8, device=model.device)
        shape = (block_count, self.block_bytes)
        if storage.dtype != torch.uint8 or tuple(storage.shape) != shape or not storage.is_contiguous():
            raise InvalidArgumentError(
                f"storage must be contiguous uint8 {list(shape)}, not {storage.dtype} {list(storage.shape)}"
            )
        if storage.device != model.device:
            raise InvalidArgumentError(f"storage is on {storage.device}, the model on {model.device}")
        self.storage = storage
        self._layout = PagedLayout(
            storage.view(model.torch_dtype),
            layers=model.layers,
            kv_heads=model.kv_heads,
            heads=model.heads,
            block_tokens=block_tokens,
            head_dim=model.head_dim,
        )

    def __repr__(self) -> str:
        return f"<Runner {self.model.name!r} {self.block_count} blocks of {self.block_tokens} tokens>"

    @property
    def kv(self) -> torch.Tensor:
        """The pool in the model's dtype: [block_count, layers, 2, kv_heads, block_tokens, head_dim]."""
        return self._layout.kv

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Run one step; return float32 logits [chunks with need_logits, vocab], in the order of ``chunks``.

        All tokens go through the linear layers together; attention is by sequence, single tokens grouped by length.
        Raises InvalidArgumentError, before anything is written, for a chunk that does not fit the model or the pool.
        """
        self._check(chunks)
        core, device = self.model.module.model, self.model.device
        spans = [(chunk.start, chunk.end, chunk.block_table) for chunk in chunks]
        positions = torch.tensor([at for start, end, _ in spans for at in range(start, end)], device=device)
        tokens = torch.tensor([token for chunk in chunks for token in chunk.token_ids], device=device)
        plan = plan_attention(self._layout, spans, positions)
        hidden = core.embed_tokens(tokens)
        cosines, sines = core.rotary_emb(hidden, positions.unsqueeze(0))
        cosines, sines = cosines[0], sines[0]
        wanted = self._last_rows(chunks)
        head_shape = (len(tokens), -1, self.model.head_dim)
        for index, layer in enumerate(core.layers):
            attention = layer.self_attn
            normed = layer.input_layernorm(hidden)
            query = attention.q_proj(normed).view(head_shape)
            key = attention.k_proj(normed).view(head_shape)
            value = attention.v_proj(normed).view(head_shape)
            query, key = apply_rotary_pos_emb(query, key, cosines, sines)
            plan.write(index, key, value)
            if index == len(core.layers) - 1 and not wanted:
                break
            mixed = plan.attend(index, query)
            hidden = hidden + attention.o_proj(mixed)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        if not wanted:
            return torch.empty(0, self.model.vocab_size, device=device)
        logits: torch.Tensor = self.model.module.lm_head(core.norm(hidden[wanted]))
        return logits.float()

    def wait_written(self) -> None:
        """Wait until all that forwards write is in the pool: a device does it after they return, and until then no
        block may be announced, nor given to another request. Raises what the device failed with.
        """
        if self.storage.is_cuda:
            torch.cuda.current_stream(self.storage.device).synchronize()

    @staticmethod
    def _last_rows(chunks: Sequence[Chunk]) -> list[int]:
        rows, row = [], -1
        for chunk in chunks:
            row += len(chunk.token_ids)
            if chunk.need_logits:
                rows.append(row)
        return rows

    def _check(self, chunks: Sequence[Chunk]) -> None:
        if not chunks:
            raise InvalidArgumentError("a step needs at least one chunk")
        for chunk in chunks:
            if not chunk.token_ids or chunk.start < 0:
                raise InvalidArgumentError(
                    f"a chunk needs tokens and a start from 0, not {len(chunk.token_ids)} tokens at {chunk.start}"
                )
            if chunk.end > self.model.context_tokens:
                raise InvalidArgumentError(
                    f"a chunk ends at position {chunk.end}, "
                    f"past the model's context of {self.model.context_tokens} tokens"
                )
            if len(chunk.block_table) * self.block_tokens < chunk.end:
                raise InvalidArgumentError(
                    f"{len(chunk.block_table)} blocks of {self.block_tokens} tokens do not hold {chunk.end} positions"
                )
            if min(chunk.block_table) < 0 or max(chunk.block_table) >= self.block_count:
                raise InvalidArgumentError(f"a block table names a block outside 0 to {self.block_count - 1}")
            if min(chunk.token_ids) < 0 or max(chunk.token_ids) >= self.model.vocab_size:
                raise InvalidArgumentError(f"a token id lies outside 0 to {self.model.vocab_size - 1}")
