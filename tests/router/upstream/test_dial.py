"""What a name of an engine may stand for, judged when it is dialled: what a name says may change at any time."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from kvxfer.router.upstream import UpstreamConnectError, UpstreamPool, dial
from tests.support.tiny_engine import tiny_engines

NAME = "worker.example"


@pytest.fixture
def stands_for(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says what ``NAME`` stands for."""
    texts: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        assert host == NAME
        return texts

    monkeypatch.setattr(dial, "resolve", resolve)
    return texts.extend


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("169.254.169.254", "metadata"),
        ("::ffff:169.254.169.254", "metadata"),
        ("169.254.7.7", "link-local"),
        ("fe80::1", "link-local"),
        ("64:ff9b::a9fe:707", "link-local"),
        ("0.0.0.0", "unspecified"),
        ("::", "unspecified"),
        ("224.0.0.1", "multicast"),
        ("255.255.255.255", "broadcast"),
    ],
)
async def test_a_name_that_stands_for_no_engine_is_not_connected_to(text: str, kind: str, stands_for: Any) -> None:
    """Linux takes a connection to 0.0.0.0 or :: for one to this machine, where something listens here."""
    async with tiny_engines(1) as [engine]:
        stands_for([text])
        pool = UpstreamPool(f"http://{NAME}:{engine.port}")
        with pytest.raises(UpstreamConnectError, match=rf"{NAME} stands for .*{kind}"):
            await pool.request("GET", "/latest/meta-data/")
        assert engine.asked == []
        await pool.close()


async def test_of_several_addresses_those_of_engines_are_tried_in_order(stands_for: Any) -> None:
    async with tiny_engines(1) as [engine]:
        stands_for(["169.254.169.254", "::1", "127.0.0.1"])  # nothing listens at the second
        pool = UpstreamPool(f"http://{NAME}:{engine.port}")
        async with await pool.request("GET", "/v1/models") as response:
            assert response.status == 200
        assert engine.headers[-1]["host"] == f"{NAME}:{engine.port}"
        await pool.close()


async def test_a_name_of_which_no_address_answers_fails_as_the_last_one_did(stands_for: Any) -> None:
    stands_for(["127.0.0.1"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        pool = UpstreamPool(f"http://{NAME}:{taken.getsockname()[1]}")
        with pytest.raises(UpstreamConnectError) as caught:
            await pool.request("GET", "/")
        assert isinstance(caught.value.__cause__, ConnectionRefusedError)
        await pool.close()
