"""What does not belong is refused by name: a wrong token, no token, another model's blocks."""

from __future__ import annotations

import asyncio
import os
import pathlib
import secrets
from collections.abc import AsyncIterator

import grpc.aio
import pytest
import pytest_asyncio

from kvxfer._pb import control_pb2_grpc
from kvxfer.engine.tiny import make_tiny_model
from kvxfer.errors import ConfigError, KvxferError
from tests.support.e2e.client import ask, completion, leg, new_transfer_id
from tests.support.e2e.cluster import Cluster, running
from tests.support.e2e.reference import CONTEXT_TOKENS, Reference, make_prompt

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 16
PROMPT = 100
TTL_S = 1.0


@pytest.fixture(scope="module")
def other_model(tmp_path_factory, tiny_model) -> pathlib.Path:
    """A model of the same name and config, with other weights."""
    path = tmp_path_factory.mktemp("other") / "tiny"
    return make_tiny_model(path, max_position_embeddings=CONTEXT_TOKENS, seed=77)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory, tiny_model, other_model) -> AsyncIterator[Cluster]:
    workers = {"p1": {"model": str(other_model), "grant_ttl_s": TTL_S}, "d1": {}}
    async with running(tmp_path_factory.mktemp("refused"), tiny_model, workers) as cluster:
        yield cluster


@pytest.fixture
def wrong_token(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "wrong-token"
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    return str(path)


async def refusal(cluster: Cluster, starting, kind: type[KvxferError] = KvxferError) -> str:
    """Why a part could not be started: the one sentence that it left."""
    with pytest.raises(kind) as caught:
        await starting
    assert not any("Traceback" in line for line in cluster.lines), cluster.lines
    return str(caught.value)


async def test_wrong_token(cluster: Cluster, wrong_token: str) -> None:
    said = await refusal(cluster, cluster.worker("p9", "prefill", token_file=wrong_token))
    assert "could not start" in said
    assert "token" in said
    assert "p9" not in await cluster.directory()


async def test_wrong_token_of_a_router(cluster: Cluster, wrong_token: str) -> None:
    said = await refusal(cluster, cluster.router("r9", token_file=wrong_token))
    assert "token" in said


async def test_missing_token(cluster: Cluster) -> None:
    """Nothing in the metadata at all: the coordinator says what is missing."""
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        call = control_pb2_grpc.CoordinatorStub(channel).Session()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "token" in (caught.value.details() or "")


async def test_token_file_that_others_may_read(cluster: Cluster, wrong_token: str) -> None:
    os.chmod(wrong_token, 0o644)
    said = await refusal(cluster, cluster.router("r9", token_file=wrong_token), ConfigError)
    assert "chmod 600" in said


async def test_router_does_not_pair_two_models(cluster: Cluster, tiny_reference: Reference) -> None:
    prompt = make_prompt(PROMPT)
    answer = await ask(cluster.url("router"), completion(prompt, TOKENS, "tiny"))
    assert (answer.status, answer.prefill) == (200, "local")
    assert answer.headers["x-kvxfer-prefill-reason"] == "incompatible_pools"
    tiny_reference.check(answer.token_ids, prompt, TOKENS)
    await cluster.assert_drained()


async def test_agents_refuse_another_models_blocks_by_the_field(cluster: Cluster, tiny_reference: Reference) -> None:
    """A router that pairs them all the same: the reader names the field, and computes."""
    prompt, transfer_id = make_prompt(PROMPT, seed=1), new_transfer_id()
    body = completion(prompt, TOKENS, "tiny")
    answer, _ = await asyncio.gather(
        ask(cluster.url("d1"), leg(body, transfer_id, "decode", "p1", "d1")),
        ask(cluster.url("p1"), leg(body, transfer_id, "prefill", "p1", "d1")),
    )
    assert answer.status == 200, answer.body
    assert (answer.account["prefill"], answer.account["failure"]) == ("local", "incompatible"), answer.account
    assert "weights_fingerprint" in answer.account["reason"]
    assert answer.account["bytes_moved"] == 0
    tiny_reference.check(answer.token_ids, prompt, TOKENS)
    await cluster.assert_drained(TTL_S + 1.0)


async def test_worker_that_must_not_recompute_answers_the_error(cluster: Cluster) -> None:
    await cluster.worker("d2", "decode", on_transfer_failure="fail")
    prompt = make_prompt(PROMPT, seed=2)
    body = leg(completion(prompt, TOKENS, "tiny"), new_transfer_id(), "decode", "p1", "d2")
    answer = await ask(cluster.url("d2"), body)
    assert answer.status >= 400
    assert (answer.error["code"], answer.error["retryable"]) == ("incompatible", False)
    assert "weights_fingerprint" in answer.error["message"]
    await cluster.assert_drained()
