"""Where the two ends stand: on one host, or in two network namespaces joined by a virtual link.

It decides what is made on the machine and takes it all away again. It must never know what is measured there.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

from measure.ends import Site

HOSTS = ("10.213.77.1", "10.213.77.2")
SHARED_HUGE = pathlib.Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def netns_obstacle() -> str:
    """Why two network namespaces cannot be made; empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` (Debian: iproute2)"
    return ""


@contextlib.contextmanager
def two_namespaces() -> Iterator[Site]:
    """Two network namespaces with one veth pair between them, nothing else in them. Raises CalledProcessError."""
    mark = f"kvx{os.getpid()}"
    names = (f"{mark}a", f"{mark}b")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", f"{mark}a", "netns", names[0], "type", "veth", "peer", "name", f"{mark}b", "netns", names[1])
        for name, host in zip(names, HOSTS, strict=True):
            ip("-n", name, "address", "add", f"{host}/30", "dev", name)
            for device in (name, "lo"):
                ip("-n", name, "link", "set", device, "up")
        prefixes = tuple(("ip", "netns", "exec", name) for name in names)
        yield Site(HOSTS, (prefixes[0], prefixes[1]), names)
    finally:
        # A namespace takes its end of the link along, and one end the other.
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def shared_huge_obstacle() -> str:
    """Why shared memory cannot lie on huge pages; empty where it can, now or with :func:`consent_to_shared_huge`."""
    if not SHARED_HUGE.exists():
        return "this kernel has no transparent huge pages for shared memory"
    if "[never]" in SHARED_HUGE.read_text() and not os.access(SHARED_HUGE, os.W_OK):
        return f"{SHARED_HUGE} says never, and only root can change it"
    return ""


@contextlib.contextmanager
def consent_to_shared_huge() -> Iterator[None]:
    """Let shared memory that asks for huge pages have them, as an operator would; put back at the end."""
    before = SHARED_HUGE.read_text().split("[")[1].split("]")[0]
    if before != "never":
        yield
        return
    SHARED_HUGE.write_text("advise")
    try:
        yield
    finally:
        SHARED_HUGE.write_text(before)
