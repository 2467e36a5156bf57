"""vLLM's own NixlConnector, unmodified, on kvxfer in place of NIXL: `kvxfer nixl -- vllm serve ...`. Both its ways: the
decode engine reads (pull), or the prefill engine writes (push)."""

from __future__ import annotations

import pathlib
import socket
import uuid
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

import kvxfer.connectors
from tests.support.vllm.checks import prompt
from tests.support.vllm.engines import Cluster, hand_over

pytestmark = pytest.mark.asyncio(loop_scope="package")

NIXL = pathlib.Path(kvxfer.connectors.__file__).parent / "nixl"
LENGTHS = (3, 15, 16, 17, 64, 129, 500, 1000, 1500)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest_asyncio.fixture(loop_scope="package", params=["NixlConnector", "NixlPushConnector"])
async def pair(request: pytest.FixtureRequest, cluster: Cluster) -> AsyncIterator[Cluster]:
    for name, role in (("pn", "kv_producer"), ("dn", "kv_consumer")):
        transfer = {"kv_connector": request.param, "kv_role": role, "kv_buffer_device": "cpu"}
        environment = {
            "PYTHONPATH": str(NIXL / "shims"),  # what `kvxfer nixl` does
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": free_port(),
        }
        await cluster.start(name, None, transfer=transfer, environment=environment)
    for name in ("pn", "dn"):
        await cluster[name].wait_ready()
    yield cluster
    for name in ("pn", "dn"):
        await cluster.engines.pop(name).stop()


async def test_tokens_are_the_same(pair: Cluster) -> None:
    wanted, got = [], []
    for length in LENGTHS:
        ids = prompt(length, seed="nixl")
        wanted.append((await pair["mono"].generate(ids, 20)).tokens)
        # Push finds a prompt by the request's id, so a router must give both legs the same.
        _, answer = await hand_over(pair["pn"], pair["dn"], ids, 20, uuid.uuid4().hex)
        got.append(answer.tokens)
        assert answer["loaded_ms"] is not None  # it was moved, and not computed again
    assert got == wanted
    assert [await pair[name].ask("nixl") for name in ("pn", "dn")] == [str(NIXL / "api.py")] * 2
