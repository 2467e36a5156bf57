"""``kvxfer doctor``: which lanes this machine has, why not the others, and what limits it sets; of one process, whether
it can be read from here.

Decides by trying: each check does the thing that the lane would do, on a throw-away object. Changes nothing.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import ctypes
import dataclasses
import fcntl
import importlib
import importlib.metadata
import mmap
import os
import platform
import resource
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from kvxfer import __version__, places
from kvxfer.cli.console import size, table
from kvxfer.cli.flags import print_json_line
from kvxfer.config import (
    LANES_VARIABLE,
    addresses,
    check_addresses,
    check_coordinator_files,
    check_positive,
    operator_lanes,
)
from kvxfer.errors import ConfigError, KvxferError
from kvxfer.types import Lane

F_ADD_SEALS = 1033
SEALS = 0x0002 | 0x0004 | 0x0010
"""SHRINK, GROW and FUTURE_WRITE: what the ``mapped`` lane puts on a pool."""
PID_MAX = 1 << 22
"""The kernel's own bound."""
PACKAGES = ("numpy", "grpcio", "protobuf", "prometheus-client", "fastapi", "httpx", "torch", "transformers", "gguf")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report. ``is_ok`` None: neither good nor bad, worth knowing."""

    section: str
    name: str
    is_ok: bool | None
    detail: str


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--pid", type=int, metavar="PID", help="also say whether cma could read this process from here")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="also try to reach this coordinator")
    for name, what in (
        ("ca", "the CAs of the coordinator's certificate"),
        ("cert", "the certificate to show to it"),
        ("key", "that certificate's key"),
    ):
        parser.add_argument(f"--coordinator-{name}-file", default="", metavar="FILE", help=f"PEM file with {what}")
    parser.add_argument("--timeout-s", type=float, default=3.0, metavar="SECONDS", help="for reaching it (default: 3)")


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 where something that was asked for by name, the core, or every lane is not there.

    Raises ConfigError for a flag's value that cannot be, a process that is not there among them.
    """
    check_positive("timeout_s", args.timeout_s, maximum=86400)
    if args.coordinator:
        check_addresses("coordinator", args.coordinator)
    if args.pid is not None:
        check_positive("pid", args.pid, maximum=PID_MAX)
    asked = [] if args.pid is None else [process(args.pid)]
    findings = [*lanes(), *asked, *files(), *host(), *versions()]
    if args.coordinator:
        for address in addresses(args.coordinator):
            findings.append(asyncio.run(_coordinator(address, args)))
    if args.json:
        print_json_line({"kvxfer": __version__, "findings": [dataclasses.asdict(finding) for finding in findings]})
    else:
        print(_report(findings))
    broken = [f for f in findings if f.is_ok is False and f.section in ("core", "process", "coordinator")]
    return 1 if broken or not any(f.is_ok for f in findings if f.section == "lanes") else 0


def _report(findings: list[Finding]) -> str:
    marks = {True: "yes", False: "no", None: ""}
    parts = []
    for section in dict.fromkeys(finding.section for finding in findings):
        rows = [[f.name, marks[f.is_ok], f.detail] for f in findings if f.section == section]
        parts.append(f"{section}\n{table(rows)}")
    return "\n\n".join(parts)


def lanes() -> list[Finding]:
    """The native core and every lane: usable or not, and why."""
    core = _tried("core", "native core", _native_core)
    found = [core]
    if core.is_ok:
        found.append(_tried("core", "checksums", _checksums))
    checks = {
        Lane.MAPPED: _mapped,
        Lane.CMA: _cma,
        Lane.UCX: _ucx,
        Lane.UNIX: _unix,
        Lane.STREAM: _stream,
    }
    allowed = operator_lanes(os.environ)
    for lane, check in checks.items():
        if lane not in allowed:
            found.append(Finding("lanes", lane.value, False, f"not allowed by {LANES_VARIABLE}"))
        elif core.is_ok:
            found.append(_tried("lanes", lane.value, check))
        else:
            found.append(Finding("lanes", lane.value, False, "the native core does not load"))
    return found


def _tried(section: str, name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(section, name, True, check())
    except (OSError, ImportError, KvxferError) as error:
        return Finding(section, name, False, " ".join(str(error).split()))


def _native_core() -> str:
    return f"loads from {importlib.import_module('kvxfer._native._core').__file__}"


def _checksums() -> str:
    method = importlib.import_module("kvxfer._native._core").crc32c_methods()[0]
    return f"CRC-32C by {method}; on unix and stream of pools and registered memory, on the other lanes of pools alone"


def _mapped() -> str:
    _check_socket_place()
    if not hasattr(os, "memfd_create"):
        raise ConfigError("this Python has no memfd_create")
    try:
        descriptor = os.memfd_create("kvxfer-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise ConfigError(
            f"memfd_create: {error.strerror} (a seccomp profile has to allow it); pools lie in private memory instead"
        ) from None
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE):
            try:
                fcntl.fcntl(descriptor, F_ADD_SEALS, SEALS)
            except OSError as error:
                raise ConfigError(f"memfd seals are refused ({error.strerror}); they need Linux 5.1 or newer") from None
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        with ours, theirs:
            descriptors = array.array("i", [descriptor])
            ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
            _, received, _, _ = socket.recv_fds(theirs, 1, 1)
            for copy in received:
                os.close(copy)
            if not received:
                raise ConfigError("descriptors do not pass over Unix sockets here")
    finally:
        os.close(descriptor)
    return "sealed shared memory, descriptors over Unix sockets: same host, pools that kvxfer allocates"


def _cma() -> str:
    obstacle = importlib.import_module("kvxfer._native._core").cma_obstacle()
    if obstacle:
        raise ConfigError(obstacle)
    _check_socket_place()
    return "the kernel copies between processes: same host and user, any memory"


def process(pid: int) -> Finding:
    """Whether ``cma`` could read that process from this one, and why not. Raises ConfigError where there is no such
    process (any more)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        raise ConfigError(f"there is no process {pid}") from None
    except PermissionError:
        pass  # it is there, and another user's
    if _status(pid, "State").startswith("Z"):
        raise ConfigError(f"process {pid} has ended, and its parent has not noticed yet")
    return _tried("process", f"cma from {pid}", lambda: _cma_from(pid))


def _cma_from(pid: int) -> str:
    obstacle = importlib.import_module("kvxfer._native._core").cma_obstacle(pid)
    if obstacle:
        raise ConfigError(obstacle)
    users = _status(pid, "Uid").split()  # real, effective, saved, of files
    if users and int(users[1]) != os.geteuid():
        raise ConfigError(
            f"it is user {users[1]}'s, and cma joins agents of one user: this is {os.geteuid()}'s process"
        )
    return "this process can read its memory"


def _status(pid: int, field: str) -> str:
    """What the kernel says of a process; empty where it says nothing (``hidepid``, or it has just ended)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{field}:")), "")


def _ucx() -> str:
    from kvxfer.transport import ucx

    report = ucx.inspect()
    if report.obstacle:
        raise ConfigError(report.obstacle)
    return str(report)


def _check_socket_place() -> None:
    """Agents of one host meet over a Unix socket; raise ConfigError where it has no place, saying what to set."""
    place = importlib.import_module("kvxfer.transport.socket_place").find_socket_place("")
    if place.own is not None:
        place.own.remove()
    if place.obstacle:
        raise ConfigError(place.obstacle)


def _unix() -> str:
    _check_socket_place()
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        ours.sendall(b"x")
        theirs.recv(1)
    return "as stream, over a Unix socket: same host and user"


def _stream() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=2):
        pass
    from kvxfer.transport.encryption import openssl_obstacle

    obstacle = openssl_obstacle(os.environ.get("KVXFER_OPENSSL_LIBRARY", ""))
    return f"TCP: any host; {f'plain with insecure alone: {obstacle}' if obstacle else 'encrypted between hosts'}"


def files() -> list[Finding]:
    """Where files of this user lie, and what to set where they cannot lie there."""
    return [_tried("files", "cluster token", _token_file), _tried("files", "models", _models)]


def _token_file() -> str:
    token = importlib.import_module("kvxfer.rpc.token")
    return _place(token.default_token_path(), token.INSTEAD)


def _models() -> str:
    store = importlib.import_module("kvxfer.engine.model_store")
    return _place(store.default_cache_dir(), store.INSTEAD)


def _place(path: Path, instead: str) -> str:
    obstacle = "" if path.is_file() else places.unwritable(path)
    if obstacle:
        raise ConfigError(f"{path} cannot be made: {obstacle}; {instead} names another place")
    return str(path)


def host() -> list[Finding]:
    """Limits and settings of the host that change what the lanes can do."""
    cores = len(os.sched_getaffinity(0))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = [
        Finding("host", "kernel", None, f"{platform.system()} {platform.release()} {platform.machine()}"),
        Finding("host", "cores", None, f"{cores} usable of {os.cpu_count()}"),
        Finding("host", "memory", None, f"{size(free)} free of {size(total)}"),
        Finding("host", "open files", files[0] >= 1024, f"{_limit(files[0])}, up to {_limit(files[1])} (ulimit -n)"),
        Finding("host", "locked memory", None, f"{_bytes(locked[0])} (ulimit -l); RDMA needs the pools' size"),
    ]
    for name, file, advice in (
        ("huge pages, private", "enabled", "pools in private memory use them where this says always or madvise"),
        ("huge pages, shared", "shmem_enabled", "for mapped pools: echo advise, as root, into this file"),
    ):
        path = Path("/sys/kernel/mm/transparent_hugepage") / file
        chosen = _chosen(path)
        is_on = None if chosen is None else chosen not in ("never", "deny")
        found.append(Finding("host", name, is_on, f"{path} is {chosen or 'not there'}; {advice}"))
    return found


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _bytes(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else size(value)


def _chosen(path: Path) -> str | None:
    try:
        words = path.read_text().split()
    except OSError:
        return None
    return next((word.strip("[]") for word in words if word.startswith("[")), None)


def versions() -> list[Finding]:
    """What is installed; a missing package of an extra is no fault."""
    found = [
        Finding("versions", "kvxfer", None, __version__),
        Finding("versions", "python", None, sys.version.split()[0]),
        Finding("versions", "libc", None, " ".join(platform.libc_ver()) or str(ctypes.CDLL(None))),
    ]
    for package in PACKAGES:
        try:
            found.append(Finding("versions", package, None, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            found.append(Finding("versions", package, None, "not installed"))
    return found


async def _coordinator(address: str, args: argparse.Namespace) -> Finding:
    from kvxfer.rpc import coordinator_tls
    from kvxfer.rpc.link import open_channel

    files = args.coordinator_ca_file, args.coordinator_cert_file, args.coordinator_key_file
    check_coordinator_files(*files)
    channel = open_channel(address, coordinator_tls(*files))
    try:
        async with asyncio.timeout(args.timeout_s):
            await channel.channel_ready()
    except TimeoutError:
        return Finding("coordinator", address, False, f"not reachable within {args.timeout_s:g} s")
    finally:
        await channel.close(None)
    return Finding("coordinator", address, True, "accepts connections")
