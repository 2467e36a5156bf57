"""A connection cut in the middle of a transfer: the next one carries what is missing, and no more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native
from tests.support.native.cutting_proxy import CuttingProxy
from tests.support.native.nodes import NewId

KEY = b"k" * 32
STREAM, UNIX = native.Lane.STREAM, native.Lane.UNIX
SIZE, COUNT = 32768, 2048
CUTS = [12_000_000, 20_000_000, 16_000_000]


def name(d: Any, p: Any, port: int) -> None:
    """`p` as `d` is to reach it."""
    d.core.set_peer(p.ref, KEY, tcp_host="127.0.0.1", tcp_port=port, unix_path="")


@pytest.mark.parametrize("verb", ["pull", "fetch", "push"])
def test_only_the_missing_part_is_sent_again(nodes: Any, new_id: NewId, verb: str) -> None:
    p = nodes("source", block_bytes=SIZE, blocks=COUNT)
    d = nodes("reader", block_bytes=SIZE, blocks=COUNT)
    p.fill_random()
    d.fill(0xEE)
    source, target = p.register(SIZE * COUNT), d.register(SIZE * COUNT)
    source.memory[:] = p.memory
    target.memory[:] = 0xEE
    # Bytes towards the dialer are counted: a push's own bytes go the other way.
    proxy = CuttingProxy(p.core.tcp_port, CUTS) if verb != "push" else CuttingProxy(d.core.tcp_port, [], CUTS)
    own, transfer = (p if verb == "push" else d), new_id()
    try:
        name(d, p, proxy.address if verb != "push" else 0)
        name(p, d, proxy.address if verb == "push" else 0)
        if verb == "pull":
            p.grant(transfer, np.arange(COUNT))
            d.pull(transfer, p, np.arange(COUNT), lanes=[STREAM])
        elif verb == "fetch":
            d.fetch(
                transfer, p, [(target.id, 0, SIZE, SIZE, COUNT)], [(source.id, 0, SIZE, SIZE, COUNT)], lanes=[STREAM]
            )
        else:
            p.push(
                transfer, d, [(source.id, 0, SIZE, SIZE, COUNT)], [(target.id, 0, SIZE, SIZE, COUNT)], lanes=[STREAM]
            )
        final = own.wait_drained(transfer)
        assert final.state == native.TransferState.COMMITTED, final.text
        assert proxy.cut == len(CUTS)
        landed = d.memory if verb == "pull" else target.memory
        assert landed.tobytes() == p.memory.tobytes()
        # Lost with each cut: what its DATA frame had carried so far, and what was in the sockets and the proxy.
        slack = len(CUTS) * (9 << 20)
        assert p.core.statistics().bytes_streamed_out <= SIZE * COUNT + slack
        assert d.core.statistics().bytes_streamed_in <= SIZE * COUNT + len(CUTS) * (1 << 20)
    finally:
        d.core.close()
        p.core.close()
        proxy.close()
