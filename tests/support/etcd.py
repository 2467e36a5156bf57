"""Real etcd nodes on free loopback ports, plain or with TLS. Ends them all; needs Debian's ``etcd-server`` (the binary
``etcd``)."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator

import pytest

from kvxfer.coordinator.store import EtcdFiles
from kvxfer.trust.identity import CertRole
from tests.support.trust import ClusterAuthority

BINARY = shutil.which("etcd") or ""
needs_etcd = pytest.mark.skipif(not BINARY, reason="the binary etcd is not here: apt-get install etcd-server")
HEALTHY_S = 60.0


class EtcdNodes:
    """One etcd of ``count`` nodes. A node keeps its ports and its folder when it is started again. With a CA they speak
    TLS, and let in who shows a certificate of it."""

    def __init__(self, folder: pathlib.Path, count: int, ca: ClusterAuthority | None = None) -> None:
        self._folder = folder
        self._ca = ca
        self._context: ssl.SSLContext | None = None
        if ca is not None:
            for node in range(count):
                ca.issue(CertRole.WORKER, f"n{node}")
            files = self.files("test")
            self._context = ssl.create_default_context(cafile=files.ca_file)
            self._context.load_cert_chain(files.cert_file, files.key_file)
        ports = free_ports(2 * count)
        self.clients, self._peers = ports[:count], ports[count:]
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def endpoints(self) -> str:
        """As ``--store etcd:`` takes them."""
        return ",".join(f"127.0.0.1:{port}" for port in self.clients)

    def files(self, name: str) -> EtcdFiles:
        """What the coordinator of that name shows and believes; former files of that name are replaced."""
        assert self._ca is not None
        issued = self._ca.issue(CertRole.COORDINATOR, name)
        return EtcdFiles(self._ca.ca_file, str(issued.cert_file), str(issued.key_file))

    def start(self, node: int) -> None:
        scheme = "https" if self._ca else "http"
        peers = ",".join(f"n{number}={scheme}://127.0.0.1:{port}" for number, port in enumerate(self._peers))
        client, peer = (f"{scheme}://127.0.0.1:{ports[node]}" for ports in (self.clients, self._peers))
        flags = {
            "name": f"n{node}",
            "data-dir": str(self._folder / f"n{node}"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": peers,
            "initial-cluster-state": "new",
            "logger": "zap",
            "log-level": "error",
            "unsafe-no-fsync": "true",
        }
        if self._ca is not None:
            own = self._ca.directory / f"worker-n{node}"
            for before in ("", "peer-"):
                flags |= {f"{before}cert-file": f"{own}.pem", f"{before}key-file": f"{own}.key"}
                flags |= {f"{before}trusted-ca-file": self._ca.ca_file, f"{before}client-cert-auth": "true"}
        known = subprocess.run([BINARY, "--help"], capture_output=True, text=True, check=False)
        words = [f"--{name}={value}" for name, value in flags.items() if f"--{name}" in known.stdout + known.stderr]
        log = (self._folder / f"n{node}.log").open("ab")
        with log:
            self._nodes[node] = subprocess.Popen([BINARY, *words], stdout=log, stderr=log)

    def signal(self, node: int, number: int) -> None:
        self._nodes[node].send_signal(number)

    def kill(self, node: int) -> None:
        """kill -9."""
        process = self._nodes.pop(node)
        process.kill()
        process.wait()

    def replace_all(self) -> None:
        """kill -9 of all nodes, and a new cluster with empty disks in their places."""
        for node in range(len(self.clients)):
            self.kill(node)
            shutil.rmtree(self._folder / f"n{node}")
        for node in range(len(self.clients)):
            self.start(node)
        self.healthy()

    def healthy(self, *nodes: int) -> None:
        """Wait until these nodes, or all, say that they belong to a majority with a leader."""
        deadline_s = time.monotonic() + HEALTHY_S
        for node in nodes or range(len(self.clients)):
            while not self._is_healthy(node):
                assert time.monotonic() < deadline_s, f"etcd node {node} is not healthy within {HEALTHY_S:g} s"
                time.sleep(0.05)

    def empty(self) -> None:
        """Forget all keys."""
        every_key = {"key": "AA==", "range_end": "AA=="}
        url = f"http://127.0.0.1:{self.clients[0]}/v3/kv/deleterange"
        request = urllib.request.Request(url, json.dumps(every_key).encode())
        urllib.request.urlopen(request, timeout=10.0).close()

    def _is_healthy(self, node: int) -> bool:
        url = f"{'https' if self._ca else 'http'}://127.0.0.1:{self.clients[node]}/health"
        try:
            with urllib.request.urlopen(url, timeout=2.0, context=self._context) as answer:
                return bool(json.load(answer)["health"] == "true")
        except (OSError, ValueError):
            return False

    def stop(self) -> None:
        for node in list(self._nodes):
            self.signal(node, signal.SIGCONT)
            self.kill(node)


@contextlib.contextmanager
def etcd_nodes(folder: pathlib.Path, count: int, ca: ClusterAuthority | None = None) -> Iterator[EtcdNodes]:
    nodes = EtcdNodes(folder, count, ca)
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
