"""Requests from the router to workers over TLS and with leg keys, in a whole service of real processes."""

from __future__ import annotations

import pathlib
from typing import Any

import httpx
import pytest

from kvxfer.trust.identity import CertRole
from tests.support.e2e.client import ask, completion
from tests.support.e2e.cluster import Cluster, together
from tests.support.e2e.reference import Reference, make_prompt
from tests.support.trust import ClusterAuthority

TOKENS = 8


def certified(ca: ClusterAuthority, role: CertRole, name: str) -> dict[str, Any]:
    """The flags of a worker that shows one certificate to the coordinator and at its HTTP port."""
    issued = ca.issue(role, name)
    cert, key = str(issued.cert_file), str(issued.key_file)
    return {
        "coordinator_ca_file": ca.ca_file,
        "coordinator_cert_file": cert,
        "coordinator_key_file": key,
        "token_file": "/absent",
        **({"worker_ca_file": ca.ca_file, "worker_cert_file": cert, "worker_key_file": key}
           if role is CertRole.ROUTER
           else {"tls_client_ca_file": ca.ca_file, "tls_cert_file": cert, "tls_key_file": key, "leg_key_file": None}),
    }  # fmt: skip


async def test_legs_cross_with_certificates(
    tmp_path: pathlib.Path, tiny_model: pathlib.Path, tiny_reference: Reference
) -> None:
    pytest.importorskip("cryptography")
    ca = ClusterAuthority(tmp_path / "ca")
    async with Cluster(tmp_path, tiny_model) as cluster:
        await cluster.coordinator(**ca.coordinator_options())
        await together(
            cluster.router(**certified(ca, CertRole.ROUTER, "r0")),
            cluster.worker("p1", "prefill", **certified(ca, CertRole.PREFILL, "p1")),
            cluster.worker("d1", "decode", **certified(ca, CertRole.DECODE, "d1")),
        )
        await cluster.seen("p1", "d1")
        assert cluster.url("d1").startswith("https://")
        prompt = make_prompt(100, seed=1)
        answer = await ask(cluster.url("router"), completion(prompt, TOKENS, "tiny"))
        assert (answer.status, answer.prefill) == (200, "remote"), answer.body
        tiny_reference.check(answer.token_ids, prompt, TOKENS)
        with pytest.raises(httpx.TransportError):
            await ask(cluster.url("d1"), completion(prompt, TOKENS, "tiny"))


async def test_legs_carry_the_coordinators_keys(
    tmp_path: pathlib.Path, tiny_model: pathlib.Path, tiny_reference: Reference
) -> None:
    async with Cluster(tmp_path, tiny_model) as cluster:
        await cluster.coordinator()
        await together(
            cluster.router(workers=2),
            cluster.worker("p1", "prefill", leg_key_file=None),
            cluster.worker("d1", "decode", leg_key_file=None),
        )
        await cluster.seen("p1", "d1")
        prompt = make_prompt(100, seed=1)
        answer = await ask(cluster.url("router"), completion(prompt, TOKENS, "tiny"))
        assert (answer.status, answer.prefill) == (200, "remote"), answer.body
        tiny_reference.check(answer.token_ids, prompt, TOKENS)
        direct = await ask(cluster.url("d1"), completion(prompt, TOKENS, "tiny"))
        assert (direct.status, direct.error["code"]) == (401, "unauthenticated")
