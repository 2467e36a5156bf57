"""kvxfer as a secondary tier of vLLM's offloading: blocks that vLLM evicts go to a store of kvxfer's, and come back.

vLLM finds the class by the type ``kvxfer``, or by ``"type": "KvxferTier"`` and this package as ``module_path``.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "KvxferTier":
        from kvxfer.connectors.vllm.tier.manager import KvxferTier

        return KvxferTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
