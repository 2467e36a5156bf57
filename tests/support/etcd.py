"""Real etcd nodes, on free loopback ports or on hosts of their own, plain or with TLS. Ends them all; needs Debian's
``etcd-server`` (the binary ``etcd``)."""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvxfer.coordinator.store import EtcdFiles
from kvxfer.trust.identity import CertRole
from tests.support.trust import ClusterAuthority

BINARY = shutil.which("etcd") or ""
needs_etcd = pytest.mark.skipif(not BINARY, reason="the binary etcd is not here: apt-get install etcd-server")
HEALTHY_S = 60.0
CLIENT_PORT, PEER_PORT = 2379, 2380


class EtcdNodes:
    """One etcd of ``count`` nodes. A node keeps its address and its folder when it is started again. With a CA they
    speak TLS, and let in who shows a certificate of it."""

    def __init__(
        self,
        folder: pathlib.Path,
        count: int,
        ca: ClusterAuthority | None = None,
        *,
        hosts: Sequence[str] = (),
        commands: Sequence[Sequence[str]] = (),
    ) -> None:
        """``hosts``: each node's own address, with all ports free; ``commands``: what goes before a command so that it
        runs there."""
        self._folder = folder
        self._ca = ca
        self._context: ssl.SSLContext | None = None
        if ca is not None:
            for node in range(count):
                ca.issue(CertRole.WORKER, f"n{node}")
            files = self.files("test")
            self._context = ssl.create_default_context(cafile=files.ca_file)
            self._context.load_cert_chain(files.cert_file, files.key_file)
        self._scheme = "https" if ca else "http"
        ports = [CLIENT_PORT, PEER_PORT] * count if hosts else free_ports(2 * count)
        hosts = hosts or ["127.0.0.1"] * count
        self._commands = commands or [()] * count
        self._clients = [f"{host}:{port}" for host, port in zip(hosts, ports[::2], strict=True)]
        self._peers = [f"{host}:{port}" for host, port in zip(hosts, ports[1::2], strict=True)]
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def endpoints(self) -> str:
        """As ``--store etcd:`` takes them."""
        return ",".join(self._clients)

    def files(self, name: str) -> EtcdFiles:
        """What the coordinator of that name shows and believes; former files of that name are replaced."""
        assert self._ca is not None
        issued = self._ca.issue(CertRole.COORDINATOR, name)
        return EtcdFiles(self._ca.ca_file, str(issued.cert_file), str(issued.key_file))

    def start(self, node: int, *, is_new: bool = True) -> None:
        """``is_new``: the cluster is begun by this node too; otherwise it has been added to one that there is."""
        peers = ",".join(f"n{number}={self._scheme}://{address}" for number, address in enumerate(self._peers))
        client, peer = f"{self._scheme}://{self._clients[node]}", f"{self._scheme}://{self._peers[node]}"
        flags = {
            "name": f"n{node}",
            "data-dir": str(self._folder / f"n{node}"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": peers,
            "initial-cluster-state": "new" if is_new else "existing",
            "logger": "zap",
            "log-level": "error",
            "unsafe-no-fsync": "true",
        }
        if self._ca is not None:
            own = self._ca.directory / f"worker-n{node}"
            for before in ("", "peer-"):
                flags |= {f"{before}cert-file": f"{own}.pem", f"{before}key-file": f"{own}.key"}
                flags |= {f"{before}trusted-ca-file": self._ca.ca_file, f"{before}client-cert-auth": "true"}
        words = [f"--{name}={value}" for name, value in flags.items() if f"--{name}" in _known_flags()]
        log = (self._folder / f"n{node}.log").open("ab")
        with log:
            self._nodes[node] = subprocess.Popen([*self._commands[node], BINARY, *words], stdout=log, stderr=log)

    def signal(self, node: int, number: int) -> None:
        self._nodes[node].send_signal(number)

    def kill(self, node: int) -> None:
        """kill -9."""
        process = self._nodes.pop(node)
        process.kill()
        process.wait()

    def replace_all(self) -> None:
        """kill -9 of all nodes, and a new cluster with empty disks in their places."""
        for node in range(len(self._clients)):
            self.kill(node)
            shutil.rmtree(self._folder / f"n{node}")
        for node in range(len(self._clients)):
            self.start(node)
        self.healthy()

    def replace_one(self, node: int) -> None:
        """What an operator does about a node that is dead and has lost its disk: take the dead member out, and add a
        new one in its place. It must still be started, and not as the first of a new etcd."""
        shutil.rmtree(self._folder / f"n{node}", ignore_errors=True)
        at = next(number for number in range(len(self._clients)) if number != node)
        url = f"{self._scheme}://{self._peers[node]}"
        deadline_s = time.monotonic() + HEALTHY_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(OSError):  # members change only once the living ones are connected for 5 s
                there = [
                    member for member in self._ask(at, "cluster/member/list")["members"] if url in member["peerURLs"]
                ]
                if not there:
                    self._ask(at, "cluster/member/add", {"peerURLs": [url]})
                elif there[0].get("name"):
                    self._ask(at, "cluster/member/remove", {"ID": there[0]["ID"]})
                else:
                    return
            time.sleep(0.05)
        raise AssertionError(f"etcd node {node} is not replaced within {HEALTHY_S:g} s")

    def leader(self) -> int:
        """The node that leads now."""
        deadline_s = time.monotonic() + HEALTHY_S
        while time.monotonic() < deadline_s:
            for node in self._nodes:
                with contextlib.suppress(OSError, ValueError):
                    said = self._ask(node, "maintenance/status")
                    if said.get("leader") == said["header"]["member_id"]:
                        return node
            time.sleep(0.05)
        raise AssertionError(f"no etcd node leads within {HEALTHY_S:g} s")

    def _ask(self, node: int, path: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """Etcd's gateway for JSON. Raises OSError where it refuses."""
        body = json.dumps(request or {}).encode()
        posted = urllib.request.Request(f"{self._scheme}://{self._clients[node]}/v3/{path}", body)
        with urllib.request.urlopen(posted, timeout=10.0, context=self._context) as answer:
            values: dict[str, Any] = json.load(answer)
            return values

    def healthy(self, *nodes: int) -> None:
        """Wait until these nodes, or all, say that they belong to a majority with a leader."""
        deadline_s = time.monotonic() + HEALTHY_S
        for node in nodes or range(len(self._clients)):
            while not self.is_healthy(node):
                assert time.monotonic() < deadline_s, f"etcd node {node} is not healthy within {HEALTHY_S:g} s"
                time.sleep(0.05)

    def empty(self) -> None:
        """Forget all keys."""
        self._ask(0, "kv/deleterange", {"key": "AA==", "range_end": "AA=="})

    def is_healthy(self, node: int) -> bool:
        """Whether a node says that it belongs to a majority with a leader."""
        url = f"{self._scheme}://{self._clients[node]}/health"
        try:
            with urllib.request.urlopen(url, timeout=2.0, context=self._context) as answer:
                return bool(json.load(answer)["health"] == "true")
        except (OSError, ValueError):
            return False

    def stop(self) -> None:
        for node in list(self._nodes):
            self.signal(node, signal.SIGCONT)
            self.kill(node)


@functools.cache
def _known_flags() -> str:
    known = subprocess.run([BINARY, "--help"], capture_output=True, text=True, check=False)
    return known.stdout + known.stderr


@contextlib.contextmanager
def etcd_nodes(
    folder: pathlib.Path,
    count: int,
    ca: ClusterAuthority | None = None,
    *,
    hosts: Sequence[str] = (),
    commands: Sequence[Sequence[str]] = (),
) -> Iterator[EtcdNodes]:
    nodes = EtcdNodes(folder, count, ca, hosts=hosts, commands=commands)
    try:
        for node in range(count):
            nodes.start(node)
        nodes.healthy()
        yield nodes
    finally:
        nodes.stop()


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in held]
