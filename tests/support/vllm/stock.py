"""`vllm serve` as it is, without any of kvxfer's code: alone, or with NixlConnector on NVIDIA's own wheels. Knows its
command line only."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Sequence

from tests.support.local_http import free_ports
from tests.support.stock_engines import StockEngine
from tests.support.vllm.engines import ROOT, VLLM
from tests.support.vllm.servers import NAME, SERVE, SETTINGS

WHEELS = (ROOT / "build" / "nixl-wheel", ROOT / "build" / "nixl-name")
"""What vLLM imports as ``nixl``: `make test-vllm` puts it there. It is not in vLLM's own environment, where kvxfer's
drop-in takes that name."""


def stock_vllm(
    name: str, directory: pathlib.Path, model: pathlib.Path, role: str = "", *, flags: Sequence[str] = ()
) -> StockEngine:
    """``role``: kv_producer, kv_consumer, or nothing for an engine without a connector. ``flags``: more of vLLM's."""
    more = {**SETTINGS, "VLLM_PLUGINS": ""}  # no plugin, so not kvxfer's
    if role:
        transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
        flags = [*flags, "--kv-transfer-config", json.dumps(transfer)]
        [side_port] = free_ports(1)
        more |= {
            "PYTHONPATH": os.pathsep.join([*map(str, WHEELS), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
        }

    def command(port: int) -> list[str]:
        served = [str(VLLM), "serve", str(model), "--served-model-name", NAME]
        return [*served, *SERVE, "--port", str(port), *flags]

    return StockEngine(name, directory, command, more)
