"""What a revocation does between two agents: the peer ends what it granted, and takes no session any more."""

from __future__ import annotations

import asyncio
import pathlib

import pytest

from kvxfer import Agent, AgentConfig, GrantState
from kvxfer.errors import KvxferError
from kvxfer.trust.identity import CertRole
from tests.support.agents import BLOCK_BYTES, RECORD, fresh_id, info, until
from tests.support.trust import ClusterAuthority, coordinator_process

pytest.importorskip("cryptography")

REVOKED_WITHIN_S = 10.0
OWN_END = "membership_ended"
"""What a reader says that its source took off the list of peers: the reader was hung up on, and knows why."""


def make(ca: ClusterAuthority, address: str, name: str) -> Agent:
    issued = ca.issue(CertRole.WORKER, name)
    config = AgentConfig(
        stall_s=0.3,
        reconnect_s=1.0,
        coordinator_ca_file=ca.ca_file,
        coordinator_cert_file=str(issued.cert_file),
        coordinator_key_file=str(issued.key_file),
    )
    agent = Agent(info(name), coordinator=address, config=config, connect_s=10)
    agent.allocate_pool(RECORD, block_count=16, block_bytes=BLOCK_BYTES)
    return agent


async def test_a_revoked_reader_loses_its_grant_and_gets_no_other(tmp_path: pathlib.Path) -> None:
    ca, revoked = ClusterAuthority(tmp_path / "ca"), tmp_path / "revoked"
    revoked.write_text("")
    options = ca.coordinator_options() | {"revoked_file": str(revoked)}
    async with (
        coordinator_process(tmp_path, options) as coordinator,
        make(ca, coordinator.address, "p") as source,
        make(ca, coordinator.address, "d") as reader,
    ):
        await source.wait_member("d", timeout_s=10)
        await reader.wait_member("p", timeout_s=10)
        first = fresh_id()
        source.grant(source.pools[0], [0], transfer_id=first, reader="d", ready_blocks=1)
        await reader.pull(reader.pools[0], [1], transfer_id=first, source="p", deadline_s=20)

        second = fresh_id()
        grant = source.grant(source.pools[0], [0, 1], transfer_id=second, reader="d", ready_blocks=1)
        pulling = reader.pull(reader.pools[0], [1, 2], transfer_id=second, source="p", deadline_s=60)
        await until(lambda: grant.has_begun)
        revoked.write_text("kvxfer://default/worker/d")
        async with asyncio.timeout(REVOKED_WITHIN_S):
            assert await grant.wait_ended() is GrantState.READER_GONE
        assert source.find_member("d") is None
        with pytest.raises(KvxferError) as caught:
            await pulling
        assert caught.value.code == OWN_END

        third = fresh_id()
        source.grant(source.pools[0], [0], transfer_id=third, ready_blocks=1)
        with pytest.raises(KvxferError) as caught:
            await reader.pull(reader.pools[0], [3], transfer_id=third, source="p", deadline_s=20)
        assert caught.value.code == OWN_END
