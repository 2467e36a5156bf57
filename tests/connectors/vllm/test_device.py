"""A KV cache in a device's memory: nothing is read before it is written, nothing is filled while it is still used.

No GPU: a stand-in for the driver, whose memory crashes a process that touches it from the host, and events that the
test sets."""

from __future__ import annotations

import json
import pathlib
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.connectors.vllm.pages import Pages
from kvxfer.connectors.vllm.record import check_pages
from kvxfer.connectors.vllm.worker import WorkerHalf
from kvxfer.errors import ConfigError
from tests.support import child
from tests.support.native.cuda_driver import build
from tests.support.vllm_connector.two_devices import BLOCKS, LAYERS, PAGE, Tensor

MEMORY: Any = SimpleNamespace(address=PAGE)


@pytest.mark.checkout
def test_worker_halves_over_device_memory(tmp_path: pathlib.Path) -> None:
    library = tmp_path / "libcuda.so.1"
    build(library)
    command = child.command("vllm_connector.two_devices")
    environment = child.environment(KVXFER_CUDA_LIBRARY=str(library))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    ((code, lane),) = said.pop("reports")
    assert (code, said.pop("violations")) == ("", 0), done.stderr
    assert lane in ("stream", "unix")
    assert all(said.values()), said


def unwanted(_: object) -> Any:
    pytest.fail("it should have been refused before")


def pages() -> Pages:
    return Pages.of({f"layer {layer}": Tensor(MEMORY, layer) for layer in range(LAYERS)})


def test_pages_that_are_not_vllms_blocks_are_refused() -> None:
    check_pages(pages(), BLOCKS)
    for blocks in (BLOCKS * 2, BLOCKS // 2):
        with pytest.raises(ConfigError, match=f"{LAYERS * BLOCKS} pages"):
            check_pages(pages(), blocks)


def test_digests_of_device_memory_are_refused() -> None:
    options = ConnectorOptions.from_config("kv_both", "x", {"coordinator": "127.0.0.1:1", "record_digests": True})
    half = WorkerHalf(options, unwanted, model="m", rank=0, ranks=1, new_agent=unwanted)
    with pytest.raises(ConfigError, match="record_digests"):
        half.register({f"layer {layer}": Tensor(MEMORY, layer) for layer in range(LAYERS)})
