"""A model in memory: config, tokenizer and weights, and what others need to know of them.

Decides what a prompt's tokens are and what makes two workers' KV compatible. It must never know of pools, requests
or how the directory came to be: :mod:`kvxfer.engine.model_store` does that.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from kvxfer.engine.detokenizer import Detokenizer
from kvxfer.engine.fingerprint import config_fingerprint, tokenizer_fingerprint, weights_fingerprint
from kvxfer.engine.model_files import check_config
from kvxfer.errors import ConfigError, InvalidArgumentError
from kvxfer.types import CompatibilityRecord

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AXES = "BL2HTD"
"""Order of axes in a pool: block (B), layer (L), key or value (2), KV head (H), token (T), head dimension (D)."""


class LoadedModel:
    """A Llama-family model, ready for inference: weights on one device, no gradients, fixed dtype.

    ``encode*`` and :meth:`detokenizer` may be used from any thread; the weights belong to the thread that runs the
    model."""

    def __init__(self, module: Any, tokenizer: Any, config_json: Mapping[str, Any], *, name: str) -> None:
        self.module = module
        self.tokenizer = tokenizer
        self.name = name
        self.config = module.config
        self._config_json = dict(config_json)
        self._tokenizer_lock = threading.Lock()
        # Decoding has a tokenizer of its own: the engine thread must not wait while a long prompt is encoded.
        self._decoding_tokenizer = copy.deepcopy(tokenizer)
        self._decoding_lock = threading.Lock()

    @classmethod
    def load(
        cls, path: Path | str, *, name: str | None = None, dtype: str = "float32", device: str = "cpu"
    ) -> LoadedModel:
        """Load the Hugging Face directory ``path``; ``name`` defaults to the directory's name.

        Raises ConfigError, in one sentence, for a directory without a Llama-family model, broken or missing weights
        or tokenizer files, an unknown dtype or a device that this machine lacks.
        """
        path = Path(path)
        config_json = check_config(path)
        if dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
        try:
            place = torch.device(device)
        except RuntimeError:
            raise ConfigError(f"device {device!r} is not a device name such as cpu or cuda:0") from None
        if place.type == "cuda" and not (torch.cuda.is_available() and (place.index or 0) < torch.cuda.device_count()):
            raise ConfigError(f"device {device!r} was asked for, but torch finds no such CUDA device")
        transformers.utils.logging.disable_progress_bar()
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
            module, notes = transformers.LlamaForCausalLM.from_pretrained(
                path, dtype=DTYPES[dtype], attn_implementation="sdpa", local_files_only=True, output_loading_info=True
            )
        except Exception as error:  # transformers raises whatever its parsers raise
            raise ConfigError(f"the model in {path} cannot be loaded: {_first_line(error)}") from error
        missing = sorted(notes["missing_keys"])
        if missing:
            raise ConfigError(f"the model in {path} lacks {len(missing)} weights, {missing[0]} first")
        module = module.to(place).eval().requires_grad_(False)
        return cls(module, tokenizer, config_json, name=name or path.resolve().name)

    def __repr__(self) -> str:
        return f"<LoadedModel {self.name!r} {self.layers} layers {self.dtype} on {self.device}>"

    @property
    def context_tokens(self) -> int:
        """Positions the model was made for: prompt and answer together."""
        return int(self.config.max_position_embeddings)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @functools.cached_property
    def longest_prompt_chars(self) -> int:
        """No longer text fits the context, whatever it says: as if every token were the longest of the vocabulary."""
        return self.context_tokens * max(map(len, self.tokenizer.get_vocab()))

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def heads(self) -> int:
        return int(self.config.num_attention_heads)

    @property
    def kv_heads(self) -> int:
        return int(self.config.num_key_value_heads)

    @property
    def head_dim(self) -> int:
        return int(self.module.model.layers[0].self_attn.head_dim)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.module.dtype
        return dtype

    @property
    def dtype(self) -> str:
        """``float32``, ``bfloat16`` or ``float16``."""
        return str(self.torch_dtype).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        device: torch.device = self.module.device
        return device

    @functools.cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer, from the generation config (as ``generate`` does), else config, else tokenizer."""
        generation = self.module.generation_config
        for value in (generation.eos_token_id, self.config.eos_token_id, self.tokenizer.eos_token_id):
            if value is not None:
                return frozenset(value if isinstance(value, list) else [value])
        return frozenset()

    def block_bytes(self, block_tokens: int) -> int:
        """Size of one KV block of ``block_tokens`` tokens, all layers, keys and values."""
        return self.layers * 2 * self.kv_heads * block_tokens * self.head_dim * self.torch_dtype.itemsize

    def record(self, block_tokens: int) -> CompatibilityRecord:
        """What another pool must have in common with a pool of this model and ``block_tokens``."""
        return CompatibilityRecord(
            model=self.name,
            config_fingerprint=self.config_fingerprint,
            weights_fingerprint=self.weights_fingerprint,
            dtype=self.dtype,
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_tokens=block_tokens,
            axes=AXES,
            packing="contiguous",
            rope=self._rope(),
            attention_backend="kvxfer-sdpa",
        )

    def _rope(self) -> str:
        kept = {key: value for key, value in self.config.to_dict().items() if key.startswith("rope_")}
        return json.dumps(kept, sort_keys=True, separators=(",", ":"))

    @functools.cached_property
    def config_fingerprint(self) -> str:
        """Over everything but the weights that decides which KV a prompt's text becomes: config and tokenizer."""
        with self._tokenizer_lock:
            parts = config_fingerprint(self._config_json) + tokenizer_fingerprint(self.tokenizer)
        return hashlib.sha256(parts.encode()).hexdigest()

    @functools.cached_property
    def weights_fingerprint(self) -> str:
        """Over the weights as loaded (so the dtype counts); computed once, at memory speed."""
        return weights_fingerprint(self.module.named_parameters())

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens the tokenizer adds by itself."""
        with self._tokenizer_lock:
            ids: list[int] = self.tokenizer.encode(text, verbose=False)
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation through the model's chat template, ending where the assistant begins.

        Raises InvalidArgumentError when the model has no chat template or the template refuses the messages.
        """
        if not self.tokenizer.chat_template:
            raise InvalidArgumentError(
                f"messages need a chat template; model {self.name} has none, send a prompt instead"
            )
        with self._tokenizer_lock:
            try:
                text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
            except Exception as error:  # a template is a program: it raises what it likes
                raise InvalidArgumentError(
                    f"messages do not fit the model's chat template: {_first_line(error)}"
                ) from error
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """A new incremental decoder. It never waits for :meth:`encode`, however long the text there."""
        return Detokenizer(self._decoding_tokenizer, prompt_ids, lock=self._decoding_lock)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
