"""The parts of the cluster on one machine, and the command of each: those that docs/cluster.md shows.

Decides names, files and flags. Pure; it must never know how a part is started or ended.
"""

from __future__ import annotations

import dataclasses
import os

from kvxfer.cli.flags import to_flags

ETCD = ("n0", "n1", "n2")
COORDINATORS = ("c0", "c1", "c2")
PREFILL = ("p0", "p1")
DECODE = ("d0", "d1")
ROUTERS = ("r0", "r1")
WORKERS = (*PREFILL, *DECODE)
SERVICES = (*COORDINATORS, *WORKERS, *ROUTERS)
"""What ``kvxfer`` starts; etcd's nodes are programs of their own."""
CALLER = "demo"
"""The operator, as which the demo asks coordinators, and etcd's nodes."""


@dataclasses.dataclass(frozen=True)
class Ports:
    """On 127.0.0.1, in the order of the names."""

    clients: tuple[int, ...]
    peers: tuple[int, ...]
    coordinators: tuple[int, ...]
    routers: tuple[int, ...]

    @classmethod
    def of(cls, free: list[int]) -> Ports:
        """From as many as PORTS."""
        nodes, coordinators = len(ETCD), len(COORDINATORS)
        ends = (nodes, 2 * nodes, 2 * nodes + coordinators, PORTS)
        parts = zip((0, *ends[:-1]), ends, strict=True)
        return cls(*(tuple(free[begin:end]) for begin, end in parts))


PORTS = 2 * len(ETCD) + len(COORDINATORS) + len(ROUTERS)


class ClusterPlan:
    """``folder``: where certificates, the token and etcd's data are; empty: the current one."""

    def __init__(self, ports: Ports, folder: str = "", model: str = "tiny") -> None:
        self._ports = ports
        self._folder = folder
        self._model = model

    # --- where things are ---

    def path(self, *parts: str) -> str:
        return os.path.join(self._folder, *parts)

    @property
    def ca_file(self) -> str:
        return self.path("certs", "ca.pem")

    @property
    def etcd_ca_file(self) -> str:
        return self.path("etcd-certs", "ca.pem")

    def certificate(self, role: str, name: str, *, of_etcd: bool = False) -> tuple[str, str]:
        """The certificate's file and its key's."""
        stem = self.path("etcd-certs" if of_etcd else "certs", f"{role}-{name}")
        return f"{stem}.pem", f"{stem}.key"

    def address(self, name: str) -> str:
        """Where a coordinator, a router, or a node of etcd is called by others."""
        groups = ((ETCD, self._ports.clients), (COORDINATORS, self._ports.coordinators), (ROUTERS, self._ports.routers))
        ports = {one: port for names, ports in groups for one, port in zip(names, ports, strict=True)}
        return f"127.0.0.1:{ports[name]}"

    # --- what is run ---

    def certs(self) -> list[list[str]]:
        """The words of each ``kvxfer certs``, in order."""
        made = [["init", "--dir", self.path("certs")]]
        made += [["init", "--dir", self.path("etcd-certs"), "--cluster", "etcd"]]
        of_cluster = [*(("coordinator", name) for name in COORDINATORS), *((_part(name), name) for name in WORKERS)]
        of_cluster += [*(("router", name) for name in ROUTERS), ("operator", CALLER)]
        of_etcd = [*(("worker", name) for name in ETCD), *(("coordinator", name) for name in COORDINATORS)]
        made += [["issue", *whose, "--dir", self.path("certs")] for whose in of_cluster]
        made += [["issue", *whose, "--dir", self.path("etcd-certs")] for whose in (*of_etcd, ("operator", CALLER))]
        return [["certs", *words] for words in made]

    def etcd(self, name: str) -> list[str]:
        """The words after ``etcd``."""
        at = ETCD.index(name)
        client, peer = f"https://{self.address(name)}", f"https://127.0.0.1:{self._ports.peers[at]}"
        nodes = zip(ETCD, self._ports.peers, strict=True)
        cert, key = self.certificate("worker", name, of_etcd=True)
        flags = {
            "name": name,
            "data_dir": self.path(f"{name}.etcd"),
            "listen_client_urls": client,
            "advertise_client_urls": client,
            "listen_peer_urls": peer,
            "initial_advertise_peer_urls": peer,
            "initial_cluster": ",".join(f"{node}=https://127.0.0.1:{port}" for node, port in nodes),
            "logger": "zap",
        }
        for before in ("", "peer_"):
            flags |= {f"{before}trusted_ca_file": self.etcd_ca_file, f"{before}cert_file": cert}
            flags |= {f"{before}key_file": key}
        return [*to_flags(flags), "--client-cert-auth", "--peer-client-cert-auth"]

    def service(self, name: str) -> list[str]:
        """The words after ``kvxfer``."""
        if name in COORDINATORS:
            return ["coordinator", *to_flags(self._coordinator(name))]
        if name in ROUTERS:
            return ["router", *to_flags(self._router(name))]
        return ["worker", *to_flags(self._worker(name))]

    def _coordinator(self, name: str) -> dict[str, object]:
        cert, key = self.certificate("coordinator", name)
        store_cert, store_key = self.certificate("coordinator", name, of_etcd=True)
        return {
            "port": _port(self.address(name)),
            "token_file": self.path("cluster-token"),
            "tls_client_ca_file": self.ca_file,
            "tls_cert_file": cert,
            "tls_key_file": key,
            "store": f"etcd:{','.join(map(self.address, ETCD))}",
            "store_ca_file": self.etcd_ca_file,
            "store_cert_file": store_cert,
            "store_key_file": store_key,
        }

    def _worker(self, name: str) -> dict[str, object]:
        own = {"role": _part(name), "agent_id": name, "model": self._model, "threads": 1, "kv_cache_mb": 64}
        cert, key = self.certificate(_part(name), name)
        own |= {"tls_client_ca_file": self.ca_file, "tls_cert_file": cert, "tls_key_file": key}
        return {**own, **self._to_coordinators(cert, key)}

    def _router(self, name: str) -> dict[str, object]:
        cert, key = self.certificate("router", name)
        own = {"port": _port(self.address(name)), "tls_cert_file": cert, "tls_key_file": key}
        own |= {"worker_ca_file": self.ca_file, "worker_cert_file": cert, "worker_key_file": key}
        return {**own, **self._to_coordinators(cert, key)}

    def _to_coordinators(self, cert: str, key: str) -> dict[str, object]:
        return {
            "coordinator": ",".join(map(self.address, COORDINATORS)),
            "coordinator_ca_file": self.ca_file,
            "coordinator_cert_file": cert,
            "coordinator_key_file": key,
        }


def _part(name: str) -> str:
    return "prefill" if name in PREFILL else "decode"


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
