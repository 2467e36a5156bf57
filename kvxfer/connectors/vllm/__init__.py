"""kvxfer inside vLLM: a KV connector for prefill/decode disaggregation. See docs/vllm.md.

``--kv-transfer-config '{"kv_connector": "KvxferConnector", "kv_connector_module_path": "kvxfer.connectors.vllm",
...}'``. Importing this package loads neither vLLM nor torch.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvxferConnector"]


def __getattr__(name: str) -> Any:
    if name == "KvxferConnector":
        from kvxfer.connectors.vllm.connector import KvxferConnector

        return KvxferConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
