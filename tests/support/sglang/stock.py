"""SGLang's server, unchanged: alone, or one of a pair with the transfer backend that kvxfer registers there, because
SGLang's own need a GPU: Mooncake's sender asks for pinned memory (disaggregation/prefill.py, ``_send_kv_chunk``), and
NIXL's registers the pages as VRAM, which UCX refuses. Knows its command line only, by way of :mod:`launch`."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import httpx

from tests.support.child import environment
from tests.support.local_http import free_ports
from tests.support.sglang import launch
from tests.support.stock_engines import StockEngine

ROOT = pathlib.Path(__file__).resolve().parents[3]
PYTHON = ROOT / "build" / "sglang-venv" / "bin" / "python"
NAME = "tiny"


class StockSglang(StockEngine):
    """``role``: prefill, decode, or nothing for a server that does both. ``settings``: of its environment."""

    def __init__(
        self,
        name: str,
        directory: pathlib.Path,
        model: pathlib.Path,
        role: str = "",
        settings: Mapping[str, str] | None = None,
    ) -> None:
        [self.bootstrap] = free_ports(1)

        def command(port: int) -> list[str]:
            flags = ("--served-model-name", NAME, "--disable-radix-cache")
            return launch.server(str(PYTHON), str(model), port, *flags, role=role, bootstrap=self.bootstrap)

        path = launch.python_path(environment()["PYTHONPATH"])
        more = {**launch.ENVIRONMENT, "PYTHONPATH": path, **(settings or {})}
        super().__init__(name, directory, command, more, ready_path="/v1/models")

    @property
    def as_prefill(self) -> str:
        """What the router's ``--prefill`` is given."""
        return f"{self.url}?bootstrap_port={self.bootstrap}"

    def used_tokens(self) -> int:
        """Of its pool, as SGLang counts them itself: what is neither free, nor kept by its prefix cache alone."""
        answer = httpx.get(f"{self.url}/v1/loads", params={"include": "core"}, trust_env=False, timeout=10)
        [load] = answer.json()["loads"]
        return int(load["num_used_tokens"])
