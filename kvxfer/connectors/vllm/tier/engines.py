"""Which configuration an engine of this process has: vLLM tells a tier only part of it. Decides nothing.

vLLM has no hook for it, so the function that makes the part is wrapped. An engine that was made before is not known,
and its tier stores and loads nothing.
"""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any

log = logging.getLogger("kvxfer.vllm")

_MARK = "_kvxfer_watched"
_ENGINES: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_CACHES: dict[str, Any] = {}
ENGINES_MAX = 64


def watch_engines() -> None:
    """Note the configuration of every engine that makes an offloading connector. Callable twice."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector as module

        original = module.build_offloading_config
    except (ImportError, AttributeError) as error:
        log.info("this version of vLLM has no offloading that kvxfer knows: %s", error)
        return
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def build(vllm_config: Any, kv_cache_config: Any) -> Any:
        offloading = original(vllm_config, kv_cache_config)
        note_engine(str(offloading.engine_id), vllm_config, kv_cache_config)
        return offloading

    setattr(build, _MARK, True)
    module.build_offloading_config = build


def note_engine(engine_id: str, vllm_config: Any, kv_cache_config: Any) -> None:
    """An engine of this process has that configuration."""
    _ENGINES[engine_id] = vllm_config
    _CACHES[engine_id] = kv_cache_config
    while len(_CACHES) > ENGINES_MAX:
        del _CACHES[next(iter(_CACHES))]


def configuration_of(engine_id: str) -> tuple[Any, Any] | None:
    """vLLM's configuration of the engine, and that of its cache; ``None``: not known."""
    vllm_config, kv_cache_config = _ENGINES.get(engine_id), _CACHES.get(engine_id)
    return None if vllm_config is None or kv_cache_config is None else (vllm_config, kv_cache_config)
