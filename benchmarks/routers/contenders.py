"""What is compared: how each router is installed, and its command line in front of stock engines of a dialect.

It decides versions and flags. It must never know what is measured. All peers are in one virtual environment of their
own, which kvxfer never sees; they are run by module, because two of these wheels install a program of the same name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
VENV = ROOT / "build" / "routers-venv"
PYTHON = VENV / "bin" / "python"
MARK = VENV / ".installed"
VERSIONS = {"vllm-router": "0.1.17", "sglang-router": "0.3.2", "smg": "1.13.0"}
KVXFER, VLLM_ROUTER, SGLANG_ROUTER, SMG = "kvxfer", *VERSIONS
PEERS = tuple(VERSIONS)
VLLM, SGLANG = "vllm", "sglang"
DIALECTS = (VLLM, SGLANG)
HOST = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one router process runs, and what is behind it."""

    dialect: str
    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    directory: pathlib.Path
    """Its own, for files that it reads."""
    port: int
    metrics_port: int
    policy: str
    """The peers'; empty: each peer's default."""
    more: tuple[str, ...] = ()
    """Further flags."""

    @property
    def urls(self) -> tuple[list[str], list[str]]:
        prefill, decode = ([f"http://{HOST}:{port}" for port in ports] for ports in (self.prefill, self.decode))
        return prefill, decode


def each(flag: str, *values: Sequence[str]) -> list[str]:
    """``flag`` before the values of each element."""
    return [word for group in zip(*values, strict=True) for word in (flag, *group)]


def kvxfer(place: Place) -> list[str]:
    prefill, decode = place.urls
    if place.dialect == SGLANG:
        prefill = [f"{url}?bootstrap_port={port}" for url, port in zip(prefill, place.prefill, strict=True)]
    command = [sys.executable, "-m", "kvxfer.cli", "router", f"--exit-with-parent={os.getpid()}", "--port=0"]
    return [*command, f"--dialect={place.dialect}", *each("--prefill", prefill), *each("--decode", decode), *place.more]


def _peer(place: Place, *program: str) -> list[str]:
    command = [str(PYTHON), "-I", "-m", *program, f"--host={HOST}", f"--port={place.port}"]
    command += [f"--prometheus-host={HOST}", f"--prometheus-port={place.metrics_port}"]
    return command + ([f"--policy={place.policy}"] if place.policy else [])


def vllm_router(place: Place) -> list[str]:
    prefill, decode = place.urls
    command = [*_peer(place, "vllm_router.launch_router"), "--vllm-pd-disaggregation"]
    return [*command, *each("--prefill", prefill), *each("--decode", decode), *place.more]


def _with_bootstrap_ports(place: Place) -> list[str]:
    prefill, decode = place.urls
    return [*each("--prefill", prefill, [str(port) for port in place.prefill]), *each("--decode", decode)]


def sglang_router(place: Place) -> list[str]:
    return [*_peer(place, "sglang_router", "launch"), "--pd-disaggregation", *_with_bootstrap_ports(place), *place.more]


def smg(place: Place) -> list[str]:
    """For vLLM the engines come from a file: no flag says which KV connector they have, and without one smg hands
    nothing over."""
    command = [*_peer(place, "smg", "launch"), "--pd-disaggregation"]
    if place.dialect == SGLANG:
        return [*command, *_with_bootstrap_ports(place), *place.more]
    workers = [
        {"url": url, "worker_type": kind, "kv_connector": "NixlConnector"}
        for kind, urls in zip(("prefill", "decode"), place.urls, strict=True)
        for url in urls
    ]
    file = place.directory / "workers.json"
    file.write_text(json.dumps({"version": 1, "workers": workers}))
    return [*command, "--discovery-provider=file", f"--discovery-file={file}", *place.more]


@dataclasses.dataclass(frozen=True)
class Contender:
    name: str
    dialects: tuple[str, ...]
    command: Callable[[Place], list[str]]

    @property
    def title(self) -> str:
        return f"{self.name} {VERSIONS[self.name]}" if self.name in VERSIONS else self.name


CONTENDERS = (
    Contender(KVXFER, DIALECTS, kvxfer),
    Contender(VLLM_ROUTER, (VLLM,), vllm_router),
    Contender(SGLANG_ROUTER, (SGLANG,), sglang_router),
    Contender(SMG, DIALECTS, smg),
)


def wanted() -> str:
    return "\n".join(f"{name}=={version}" for name, version in VERSIONS.items()) + "\n"


def missing() -> str:
    """Why no peer can run; empty where all can."""
    if not MARK.exists():
        return f"{VENV.relative_to(ROOT)} is not there: --install makes it"
    if MARK.read_text() != wanted():
        return f"{VENV.relative_to(ROOT)} has other versions: --install makes it anew"
    return ""


def install(index: str, pip_args: Sequence[str]) -> None:
    """Raises CalledProcessError."""
    print(f"installing {', '.join(wanted().split())} into {VENV.relative_to(ROOT)}", file=sys.stderr, flush=True)
    shutil.rmtree(VENV, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += [f"--index-url={index}"] if index else []
    subprocess.run([*pip, *pip_args, *wanted().split()], check=True, stdout=sys.stderr)
    MARK.write_text(wanted())


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now."""
    held = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports: list[int] = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports
