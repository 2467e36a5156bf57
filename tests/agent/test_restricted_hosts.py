"""Agents on hosts that give them little: the next lane carries the bytes, and what cannot be is a named error."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from kvxfer._native import _core as native
from tests.support.restricted import NOT_APPLICABLE, Restrictions, restricted

READS = textwrap.dedent(
    """
    import asyncio, json, logging, sys
    import numpy as np
    from kvxfer import Agent, CompatibilityRecord, Role, WorkerInfo
    from kvxfer.errors import KvxferError
    from kvxfer.transport.base import allocate_region
    from kvxfer.transport.engine import Op

    logging.basicConfig(format="%(message)s", level="INFO")
    BLOCKS, BLOCK_BYTES = 64, 65536
    RECORD = CompatibilityRecord("m", "c", "w", "f32", 1, 1, 1, 16, "x", "", "", "")

    async def main():
        async with Agent(WorkerInfo("p", Role.BOTH, "m", "")) as p, Agent(WorkerInfo("d", Role.BOTH, "m", "")) as d:
            p.connect_peer(d.ref, d.address, bytes(32))
            d.connect_peer(p.ref, p.address, bytes(32))
            pool = p.allocate_pool(RECORD, block_count=BLOCKS, block_bytes=BLOCK_BYTES)
            assert pool.array.shape == (BLOCKS, BLOCK_BYTES) and not pool.array.any()
            theirs, mine = (agent.register(allocate_region(BLOCKS * BLOCK_BYTES)) for agent in (p, d))
            theirs.region.owner[:] = np.arange(BLOCKS, dtype=np.uint8).repeat(BLOCK_BYTES)
            blocks = np.arange(BLOCKS, dtype=np.uint64) * BLOCK_BYTES
            local = d.prepare([(mine.record.address + block, BLOCK_BYTES, 0) for block in blocks])
            rows = [(theirs.record.address + block, BLOCK_BYTES, 0) for block in blocks]
            remote = d.prepare(rows, peer="p", records=p.memory())
            every = list(range(BLOCKS))
            result = await d.post(Op.READ, local, every, remote, every)
            same = bool((mine.region.owner == theirs.region.owner).all())
            return {"lane": result.lane_reason.partition(":")[0], "same": same, "shared": pool.is_shareable}

    try:
        print(json.dumps(asyncio.run(main())))
    except KvxferError as error:
        print(json.dumps({"code": error.code, "error": str(error)}))
    """
)
NO_MEMFD = {"memfd_create": errno.EPERM}
NO_READV = {"process_vm_readv": errno.ENOSYS}
NO_PIDFD = {"pidfd_open": errno.EPERM, "getsockopt": errno.ENOPROTOOPT}
HAS_CMA = native.cma_obstacle() == ""
NO_SOCKET = "there is no place for a Unix socket: no temporary directory can be written"


def read_on(host: Restrictions, **environment: str) -> tuple[dict[str, Any], str]:
    """What the reading agent says, and what the process logged."""
    lanes = {"KVXFER_LANES": "mapped,cma,unix,stream"}
    done = subprocess.run(
        restricted([sys.executable, "-c", READS], host),
        env={"PATH": os.defpath, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **lanes, **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode == NOT_APPLICABLE:
        pytest.skip(f"this host does not let itself be restricted so: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(
    ("host", "lane", "is_shared", "logged"),
    [
        (Restrictions(), "mapped", True, ""),
        (Restrictions(user_id=54321), "mapped", True, ""),
        (Restrictions(shm_bytes=65536), "mapped", True, ""),
        (Restrictions(has_capabilities=False), "mapped", True, ""),
        (Restrictions(open_files=64), "mapped", True, ""),
        (Restrictions(forbidden=NO_READV), "mapped", True, "lane cma is not offered: process_vm_readv is not to be "),
        (Restrictions(forbidden=NO_PIDFD), "mapped", True, "lane cma is not offered: pidfd_open is not to be had"),
        (Restrictions(forbidden=NO_MEMFD), "cma" if HAS_CMA else "unix", False, "memory is private to this process"),
        (Restrictions(forbidden=NO_MEMFD | NO_READV), "unix", False, "memory is private to this process"),
        (Restrictions(forbidden=NO_MEMFD | NO_PIDFD), "unix", False, "lane cma is not offered: pidfd_open"),
        (Restrictions(is_read_only=True), "stream", True, NO_SOCKET),
    ],
    ids=[
        "nothing",
        "no-user",
        "small-shm",
        "powerless",
        "few-files",
        "no-readv",
        "no-pidfd",
        "no-memfd",
        "no-memfd-no-readv",
        "no-memfd-no-pidfd",
        "read-only",
    ],
)
def test_an_agent_on_a_restricted_host_reads_by_the_next_lane(
    host: Restrictions, lane: str, is_shared: bool, logged: str
) -> None:
    said, log = read_on(host)
    assert said == {"lane": lane, "same": True, "shared": is_shared}
    assert logged in log


@pytest.mark.parametrize("lanes", ["mapped", "unix", "cma,unix"])
def test_an_agent_whose_lanes_all_need_a_socket_says_what_to_set(lanes: str) -> None:
    said, _ = read_on(Restrictions(is_read_only=True), KVXFER_LANES=lanes)
    assert said["code"] == "config"
    assert said["error"].startswith(NO_SOCKET)
    assert said["error"].endswith("; set XDG_RUNTIME_DIR or TMPDIR")


def test_an_agent_whose_only_lane_is_forbidden_says_so() -> None:
    said, log = read_on(Restrictions(forbidden=NO_READV), KVXFER_LANES="cma")
    assert said == {"code": "config", "error": "none of the lanes cma can join processes here"}
    assert "lane cma is not offered: process_vm_readv is not to be had" in log
