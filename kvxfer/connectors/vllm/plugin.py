"""What vLLM calls at start (entry point group ``vllm.general_plugins``): makes the connector known by its name."""

from __future__ import annotations

NAME = "KvxferConnector"


def register() -> None:
    """Callable twice: vLLM loads its plugins once in every process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvxfer.connectors.vllm", NAME)
