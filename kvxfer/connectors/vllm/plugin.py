"""What vLLM calls at start (entry point group ``vllm.general_plugins``): makes the connector and the tier known by
their names, and watches what vLLM loads."""

from __future__ import annotations

import contextlib

NAME = "KvxferConnector"
TIER = "kvxfer"


def register() -> None:
    """Callable twice: vLLM loads its plugins once in every process, before a worker is made."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvxfer.connectors.vllm.tier.engines import watch_engines
    from kvxfer.connectors.vllm.watch import watch_vllm

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvxfer.connectors.vllm", NAME)
    watch_vllm()
    watch_engines()
    with contextlib.suppress(ImportError):  # versions without secondary tiers
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        if TIER not in SecondaryTierFactory._registry:
            SecondaryTierFactory.register_tier(TIER, "kvxfer.connectors.vllm.tier", "KvxferTier")
