"""`kvxfer load run` against real vLLM: a prefill and a decode engine behind kvxfer's router, stock ones with
NixlConnector and ones with kvxfer's own connector; and `vllm serve` alone.
"""

from __future__ import annotations

import asyncio
import pathlib

import pytest

from tests.support.load_real import LoadOnEngines, check_answers, check_joined, check_not_joined, load_on
from tests.support.stock_engines import routing, serving
from tests.support.vllm import servers
from tests.support.vllm.stock import WHEELS, stock_vllm

pytestmark = pytest.mark.timeout(600)


@pytest.mark.skipif(not all(path.exists() for path in WHEELS), reason="NIXL's wheels are not there: make test-vllm")
def test_requests_to_a_stock_pair_are_joined(
    tmp_path: pathlib.Path, tiny_model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefill = stock_vllm("p", tmp_path, tiny_model, "kv_producer")
    decode = stock_vllm("d", tmp_path, tiny_model, "kv_consumer")
    where = (f"--prefill={prefill.url}", f"--decode={decode.url}", "--dialect=vllm")
    with serving(prefill, decode), routing(*where) as router:
        load = load_on(router.url, tmp_path / "out")
    with capsys.disabled():
        print(f"\nvLLM, NixlConnector: {load.figures()}")
    check_answers(load)
    check_joined(load, prefill=f"127.0.0.1-{prefill.port}", decode=f"127.0.0.1-{decode.port}")
    assert not any(phases.is_queue_told or phases.is_transfer_told for phases in load.phases)


def test_requests_to_a_pair_with_kvxfers_connector_are_joined(
    tmp_path: pathlib.Path, tiny_model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        async with servers.serving(tmp_path, tiny_model) as urls:
            loads.append(await asyncio.to_thread(load_on, urls.router, tmp_path / "out"))

    loads: list[LoadOnEngines] = []
    asyncio.run(run())
    [load] = loads
    with capsys.disabled():
        print(f"\nvLLM, kvxfer's connector: {load.figures()}")
    check_answers(load)
    check_joined(load, prefill="p", decode="d")


def test_of_one_engine_alone_no_phase_is_known_and_that_is_said(
    tmp_path: pathlib.Path, tiny_model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = stock_vllm("alone", tmp_path, tiny_model)
    with serving(engine):
        load = load_on(engine.url, tmp_path / "out")
    with capsys.disabled():
        print(f"\nvllm serve alone: {load.figures()}")
    check_answers(load)
    check_not_joined(load)
