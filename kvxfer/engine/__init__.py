"""The built-in engine: a Hugging Face Llama-family model over kvxfer's paged KV pool.

This package decides how a prompt becomes KV blocks and how KV blocks become tokens. It must never know how blocks
travel (that is the agent's) nor which worker was chosen (the router's). Importing it loads neither torch nor
transformers: the names below are resolved when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvxfer.engine.torch_cache import do_without_directory

if TYPE_CHECKING:
    from kvxfer.engine.detokenizer import Detokenizer
    from kvxfer.engine.model import LoadedModel
    from kvxfer.engine.model_store import DEFAULT_MODEL, resolve
    from kvxfer.engine.pool import BlockPool, PoolStatistics
    from kvxfer.engine.runner import Chunk, Runner
    from kvxfer.engine.sampling import Sampler, SamplingParams
    from kvxfer.engine.stop import StopChecker
    from kvxfer.engine.tiny import make_tiny_model

_HOMES = {
    "BlockPool": "pool",
    "Chunk": "runner",
    "DEFAULT_MODEL": "model_store",
    "Detokenizer": "detokenizer",
    "LoadedModel": "model",
    "PoolStatistics": "pool",
    "Runner": "runner",
    "Sampler": "sampling",
    "SamplingParams": "sampling",
    "StopChecker": "stop",
    "make_tiny_model": "tiny",
    "resolve": "model_store",
}

__all__ = [
    "DEFAULT_MODEL",
    "BlockPool",
    "Chunk",
    "Detokenizer",
    "LoadedModel",
    "PoolStatistics",
    "Runner",
    "Sampler",
    "SamplingParams",
    "StopChecker",
    "make_tiny_model",
    "resolve",
]

do_without_directory()


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
