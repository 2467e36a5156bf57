"""The whole service with certificates and without a token: it answers, and a revoked worker is out."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from kvxfer.errors import KvxferError
from kvxfer.trust.identity import CertRole
from tests.support.e2e.client import ask, completion
from tests.support.e2e.cluster import Cluster, together, until
from tests.support.e2e.reference import Reference, make_prompt
from tests.support.trust import ClusterAuthority

pytest.importorskip("cryptography")

TOKENS = 8
REVOKED_WITHIN_S = 10.0


def shown(ca: ClusterAuthority, role: CertRole, name: str) -> dict[str, Any]:
    """The flags of a process that has this certificate, and no token."""
    issued = ca.issue(role, name)
    return {
        "coordinator_ca_file": ca.ca_file,
        "coordinator_cert_file": str(issued.cert_file),
        "coordinator_key_file": str(issued.key_file),
        "token_file": "/absent",
    }


async def test_the_service_runs_on_certificates_alone(
    tmp_path: pathlib.Path, tiny_model: pathlib.Path, tiny_reference: Reference
) -> None:
    ca, revoked = ClusterAuthority(tmp_path / "ca"), tmp_path / "revoked"
    revoked.write_text("")
    async with Cluster(tmp_path, tiny_model) as cluster:
        await cluster.coordinator(**ca.coordinator_options(), revoked_file=str(revoked))
        await together(
            cluster.router(workers=2, **shown(ca, CertRole.ROUTER, "r0")),
            cluster.worker("p1", "prefill", **shown(ca, CertRole.PREFILL, "p1")),
            cluster.worker("d1", "decode", **shown(ca, CertRole.DECODE, "d1")),
        )
        await cluster.seen("p1", "d1")

        async def check(seed: int, prefill: str) -> None:
            prompt = make_prompt(100, seed=seed)
            answer = await ask(cluster.url("router"), completion(prompt, TOKENS, "tiny"))
            assert (answer.status, answer.prefill) == (200, prefill), answer.body
            tiny_reference.check(answer.token_ids, prompt, TOKENS)

        await check(1, "remote")
        with pytest.raises(KvxferError, match="may not register as d2"):
            await cluster.worker("d2", "decode", **shown(ca, CertRole.DECODE, "d9"))

        revoked.write_text("kvxfer://default/prefill/p1")

        async def is_out() -> bool:
            return "p1" not in await cluster.directory()

        await until(is_out, "the revoked worker to be out", within_s=REVOKED_WITHIN_S)
        await check(2, "local")
        statistics = await cluster.statistics("p1")
        assert not statistics["agent"]["is_coordinator_connected"]
