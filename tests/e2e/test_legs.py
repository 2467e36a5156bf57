"""Requests from the router to workers over TLS and with leg keys, in a whole service of real processes."""

from __future__ import annotations

import asyncio
import json
import pathlib
import ssl
from typing import Any

import httpx
import pytest

from kvxfer.protocol.leg_keys import leg_key
from kvxfer.rpc import MembershipWatch
from kvxfer.trust.identity import CertRole
from tests.support.e2e.client import ask, completion
from tests.support.e2e.cluster import Cluster, together, until
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
            cluster.router(workers=2, worker_names="identities", **certified(ca, CertRole.ROUTER, "r0")),
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


ROTATE_S = 1.0
ROTATIONS = 5


class Load:
    """Asks ``router`` until it is stopped, four at a time."""

    def __init__(self, cluster: Cluster, router: str = "router") -> None:
        self.statuses: list[int] = []
        self._cluster = cluster
        self._router = router
        self._is_over = False
        self._asking = [asyncio.create_task(self._ask_on(seed)) for seed in range(4)]

    async def _ask_on(self, seed: int) -> None:
        while not self._is_over:
            seed += 10
            answer = await ask(self._cluster.url(self._router), completion(make_prompt(40, seed=seed), 2, "tiny"))
            self.statuses.append(answer.status)

    async def more(self) -> None:
        """Return when requests that began after now were answered."""
        wanted = len(self.statuses) + 5

        async def are_there() -> bool:
            return len(self.statuses) >= wanted

        await until(are_there, "more answers", within_s=60.0)

    async def stop(self) -> set[int]:
        """The statuses."""
        self._is_over = True
        await asyncio.gather(*self._asking)
        return set(self.statuses)


@pytest.mark.deep
async def test_keys_rotate_under_load_and_are_in_no_line(tmp_path: pathlib.Path, tiny_model: pathlib.Path) -> None:
    async with Cluster(tmp_path, tiny_model) as cluster:
        await cluster.coordinator(leg_key_period_s=ROTATE_S)
        await together(
            cluster.router(workers=2),
            cluster.router("one"),
            cluster.worker("p1", "prefill", leg_key_file=None),
            cluster.worker("d1", "decode", leg_key_file=None),
        )
        for router in ("router", "one"):
            await cluster.seen("p1", "d1", router=router)
        token = cluster.token_file.read_bytes().strip()
        async with MembershipWatch(cluster.address, token) as watch:
            secrets: set[bytes] = set()
            loads = [Load(cluster, router) for router in ("router", "one")]

            async def has_rotated() -> bool:
                secrets.add(watch.leg_secret)
                return len(secrets - {b""}) > ROTATIONS

            try:
                await until(has_rotated, "the keys to be replaced again and again", within_s=60.0)
                for one in loads:
                    await one.more()
            finally:
                answered = [await one.stop() for one in loads]
            refs = [member.ref for member in watch.membership.members]
        assert answered == [{200}, {200}]
        keys = {leg_key(secret, ref).hex() for secret in secrets - {b""} for ref in refs}
        keys |= {secret.hex() for secret in secrets - {b""}}
        shown = "\n".join([*cluster.lines, json.dumps(await cluster.directory())])
        assert not [key for key in keys if key in shown]


@pytest.mark.deep
async def test_certificates_and_cas_are_replaced_under_load(tmp_path: pathlib.Path, tiny_model: pathlib.Path) -> None:
    """The router's and the workers' certificates of legs are renewed by another CA, and the old CA is taken away."""
    pytest.importorskip("cryptography")
    old, new = ClusterAuthority(tmp_path / "old"), ClusterAuthority(tmp_path / "new")
    believed = tmp_path / "believed.pem"
    believed.write_bytes(old.ca_bytes)
    holders = {CertRole.ROUTER: "r0", CertRole.PREFILL: "p1", CertRole.DECODE: "d1"}

    def renew(ca: ClusterAuthority) -> None:
        for role, name in holders.items():
            issued = ca.issue(role, name)
            for ending, path in (("pem", issued.cert_file), ("key", issued.key_file)):
                (tmp_path / f"{name}.{ending}").write_bytes(path.read_bytes())

    renew(old)
    tls = {
        name: {"cert_file": str(tmp_path / f"{name}.pem"), "key_file": str(tmp_path / f"{name}.key")}
        for name in holders.values()
    }

    def worker_flags(name: str) -> dict[str, Any]:
        flags = {f"tls_{key}": path for key, path in tls[name].items()}
        return flags | {"tls_client_ca_file": str(believed), "leg_key_file": None}

    async with Cluster(tmp_path, tiny_model) as cluster:
        await cluster.coordinator()
        await together(
            cluster.router(worker_ca_file=str(believed), **{f"worker_{key}": path for key, path in tls["r0"].items()}),
            cluster.worker("p1", "prefill", **worker_flags("p1")),
            cluster.worker("d1", "decode", **worker_flags("d1")),
        )
        await cluster.seen("p1", "d1")
        stale = ssl.create_default_context(cafile=str(believed))
        stale.load_cert_chain(tmp_path / "r0.pem", tmp_path / "r0.key")
        stale.check_hostname = False
        stale.verify_mode = ssl.CERT_NONE
        loading = Load(cluster)

        async def has_taken(count: int) -> bool:
            said = [line for line in cluster.lines if "were read again" in line]
            return all(sum(line.startswith(f"[{part}]") for line in said) >= count for part in ("router", "p1", "d1"))

        try:
            async with httpx.AsyncClient(verify=stale, trust_env=False) as client:
                assert (await client.get(f"{cluster.url('d1')}/held")).status_code == 200
                believed.write_bytes(old.ca_bytes + new.ca_bytes)
                await until(lambda: has_taken(1), "both CAs to be believed", within_s=20.0)
                await loading.more()
                renew(new)
                await until(lambda: has_taken(2), "the new certificates to be shown", within_s=20.0)
                await loading.more()
                believed.write_bytes(new.ca_bytes)
                await until(lambda: has_taken(3), "the old CA to be gone", within_s=20.0)
                with pytest.raises(httpx.TransportError):
                    await client.get(f"{cluster.url('d1')}/held")
                await loading.more()
        finally:
            answered = await loading.stop()
        assert answered == {200}
