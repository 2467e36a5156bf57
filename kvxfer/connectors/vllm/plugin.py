"""What vLLM calls at start (entry point group ``vllm.general_plugins``): makes the connector known by its name, and
watches what vLLM loads."""

from __future__ import annotations

NAME = "KvxferConnector"


def register() -> None:
    """Callable twice: vLLM loads its plugins once in every process, before a worker is made."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvxfer.connectors.vllm.watch import watch_vllm

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvxfer.connectors.vllm", NAME)
    watch_vllm()
