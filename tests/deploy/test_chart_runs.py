"""What the chart's containers run, run here: the rendered commands as processes on loopback, with their files, probes,
a request, and the end of a pod. Names, addresses, ports and directories are this machine's; all else is as rendered.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import re
import secrets
import shutil
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvxfer.trust.identity import CertRole
from tests.support.child import environment
from tests.support.fake_workers import eventually
from tests.support.helm.chart import MISSING, PYTHON, rendered
from tests.support.started import Started, kvxfer, ready
from tests.support.trust import ClusterAuthority

pytestmark = [
    pytest.mark.checkout,
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON.exists(), reason=MISSING),
]


class Node:
    """Where pods run: ``root`` stands for their file systems. Containers share it, and have an address of their own."""

    def __init__(self, root: pathlib.Path, model: pathlib.Path, variant: str) -> None:
        self.root = root
        self.found = rendered(variant)
        self.parts: dict[str, Started] = {}
        self.urls: dict[str, str] = {}
        self.said: dict[str, dict[str, str]] = {}
        self._model = model
        self._home = root / "home"
        self._home.mkdir()
        self.secrets = root / "secrets"
        self.secrets.mkdir()
        for name in ("cluster-token", "admin-key"):
            path = self.secrets / name
            path.write_text(secrets.token_hex(32))
            path.chmod(0o400)
        self._changes = {
            "/etc/kvxfer/secrets": str(self.secrets),
            "/etc/kvxfer/revoked": str(root / "revoked"),
            "/var/lib/kvxfer": str(self._home),
            "--host=0.0.0.0": "--host=127.0.0.1",
            "$(POD_IP)": "127.0.0.1",
            "--model=smollm2-135m-instruct": f"--model={model}",
        }
        self._service = f"{self.found.one('Service', 'coordinator')['metadata']['name']}:7400"
        (self._home / "store").mkdir()
        if self.found.has_grpc_tls:
            self._certify()

    def _certify(self) -> None:
        """What the secrets and the ConfigMap of tls.grpc hold."""
        authority = ClusterAuthority(self.root / "certs", "llm")
        for part in ("coordinator", "router", "prefill", "decode"):
            issued = authority.issue(CertRole(part), part, hosts=())  # pods have no fixed address
            place = self.root / f"grpc-tls-{part}"
            place.mkdir()
            contents = {"tls.crt": issued.cert_file, "tls.key": issued.key_file, "ca.crt": authority.ca_file}
            for name, source in contents.items():
                shutil.copy(source, place / name)
        (listed,) = [one["data"] for one in self.found.of("ConfigMap") if "revoked" in one["data"]]
        (self.root / "revoked").mkdir()
        (self.root / "revoked" / "revoked").write_text(listed["revoked"])

    def container(self, component: str) -> dict[str, Any]:
        (found,) = [c for name, _, c in self.found.containers() if name == component and c["name"] == component]
        return found

    def here(self, word: str, pod: str, component: str) -> str:
        """A word of a container, as it is on this machine. Ports are free ones."""
        own = {"$(POD_NAME)": pod, "/etc/kvxfer/grpc-tls": str(self.root / f"grpc-tls-{component}")}
        for name, value in {**self._changes, **own}.items():
            word = word.replace(name, value)
        return re.sub(r"^(--(?:\w+-)?port=)\d+$", r"\g<1>0", word)

    async def start(self, component: str, pod: str) -> dict[str, str]:
        container = self.container(component)
        words = [self.here(word, pod, component) for word in container["args"]]
        variables = {one["name"]: self.here(one["value"], pod, component) for one in container["env"] if "value" in one}
        part = Started(pod, kvxfer(*words), self.root, environment(**variables))
        self.parts[pod] = part
        said = await ready(part)
        self.urls[pod] = said.get("http_url", "")
        self.said[pod] = said
        if component == "coordinator":
            self._changes[self._service] = said["address"]
        return said

    async def probed(self, component: str, pod: str, kind: str) -> int:
        """The status that the kubelet would get."""
        asked = self.container(component)[kind]["httpGet"]
        url = self.said[pod]["http_url" if component == "coordinator" else f"{asked['port']}_url"]
        async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:
            return (await client.get(f"{url}{asked['path']}")).status_code

    async def drain(self, component: str, pod: str, router: str) -> str:
        """The pod's preStop."""
        container = self.container(component)
        values = {one["name"]: self.here(one.get("value", ""), pod, component) for one in container["env"]}
        values |= {"DRAIN_ROUTERS": self.urls[router], "PATH": f"{self.root}:/usr/bin:/bin"}
        values["DRAIN_LIVE_URL"] = self.said[pod]["probe_url"] + values["DRAIN_LIVE_URL"].rpartition(":8081")[2]
        for name, module in (("kvxfer", "-m kvxfer.cli"), ("python3", "")):
            (self.root / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
            (self.root / name).chmod(0o755)
        script = self.root / "drain.sh"
        script.write_text(self.found.one("ConfigMap", "scripts")["data"]["drain.sh"])
        shell = shutil.which("sh") or "/bin/sh"
        process = await asyncio.create_subprocess_exec(
            shell,
            str(script),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment(**values),
        )
        out, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, out
        return out.decode()

    def end(self) -> None:
        for part in self.parts.values():
            with contextlib.suppress(ProcessLookupError):
                part.kill()


@pytest.fixture
async def node(tmp_path: pathlib.Path, request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    from kvxfer.engine.tiny import make_tiny_model

    model = make_tiny_model(tmp_path / "tiny", max_position_embeddings=1024, seed=1)
    node = Node(tmp_path, model, request.param)
    try:
        yield node
    finally:
        node.end()


@pytest.mark.parametrize("node", ["kvxfer", "kvxfer-own-trust", "kvxfer-own-private"], indirect=True)
async def test_what_the_pods_run_serves_a_request_and_ends_in_order(node: Node) -> None:
    await node.start("coordinator", "c")
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert await node.probed("coordinator", "c", kind) == 200
    await node.start("router", "r")
    assert await node.probed("router", "r", "livenessProbe") == 200
    assert await node.probed("router", "r", "readinessProbe") == 503  # there is no worker yet
    await asyncio.gather(node.start("prefill", "p"), node.start("decode", "d"))
    for component, pod in (("prefill", "p"), ("decode", "d"), ("router", "r")):
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):

            async def passes(component: str = component, pod: str = pod, kind: str = kind) -> bool:
                return await node.probed(component, pod, kind) == 200

            await eventually(passes, within_s=30)
    for pod in ("p", "d"):
        assert node.urls[pod].startswith("https://" if node.found.has_worker_tls else "http://")
    async with httpx.AsyncClient(base_url=node.urls["r"], trust_env=False, timeout=60.0) as client:
        key = {"authorization": f"Bearer {(node.secrets / 'admin-key').read_text()}"}

        async def are_both_known() -> bool:
            return len((await client.get("/workers", headers=key)).json()["data"]) == 2

        await eventually(are_both_known, within_s=30)
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        body = {"model": model, "prompt": [5, 6, 7, 8] * 8, "max_tokens": 4}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-kvxfer-prefill"] == "remote"
        assert f"{node.found.agent_id('prefill', 'p')} is drained" in await node.drain("prefill", "p", "r")
        answer = await client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.headers["x-kvxfer-prefill"]) == (200, "local")
    for pod in ("p", "d", "r", "c"):
        await asyncio.to_thread(node.parts[pod].end)
        assert node.parts[pod].process.returncode == 0
