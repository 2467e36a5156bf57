"""A bit flips on a plain session between two ends that use checksums, by seed and counted: in a header, a name or a
block. A transfer commits with the right bytes, or ends by a documented code.

A plain session proves its ends and no more. Whatever changes a block and its checksum alike, as a machine on the way
can, is not noticed: that takes encryption.
"""

from __future__ import annotations

import collections
import random
from typing import Any

import pytest

from kvxfer._native import _core as native
from tests.support.native.bending_proxy import BendingProxy
from tests.support.native.nodes import POISON

STREAM = [native.Lane.STREAM]
COMMITTED = native.TransferState.COMMITTED
KEY = b"k" * 32
BLOCKS, BLOCK_BYTES, ASKED = 8, 4000, 4
HEAD_BYTES = 260
"""What the source says before the first block: its HELLO, the grant, and the header of the payload."""
SAID_BYTES = HEAD_BYTES + ASKED * BLOCK_BYTES + 200
DEADLINE_S = 5.0
CODES = {"checksum", "deadline", "peer_gone", "unauthenticated", "protocol"}


class OneFlip:
    """Flips one bit of what comes back: that of a number of bytes, on whichever connection reaches it first."""

    def __init__(self, chance: random.Random) -> None:
        self.at = chance.choice((chance.randrange(HEAD_BYTES), chance.randrange(SAID_BYTES)))
        self._mask = 1 << chance.randrange(8)
        self.has_hit = False

    def __call__(self, connection: int, offset: int, data: bytes) -> bytes:
        index = self.at - offset
        if self.has_hit or not 0 <= index < len(data):
            return data
        self.has_hit = True
        return data[:index] + bytes([data[index] ^ self._mask]) + data[index + 1 :]


@pytest.mark.parametrize(
    ("seed", "wanted"),
    [
        pytest.param(1, 20, id="20"),
        pytest.param(2, 100, id="100", marks=pytest.mark.deep),
        pytest.param(3, 1000, id="1000", marks=pytest.mark.nightly),
    ],
)
def test_a_flipped_bit_commits_no_wrong_byte(nodes: Any, seed: int, wanted: int) -> None:
    chance = random.Random(seed)
    limits = nodes.limits(stall_ns=150_000_000, reconnect_ns=3_000_000_000, handshake_ns=250_000_000)
    shape: dict[str, Any] = {"blocks": BLOCKS, "block_bytes": BLOCK_BYTES, "has_unix": False, "limits": limits}
    p, d = (nodes(name, core={"encrypt": "never"}, has_checksums=True, **shape) for name in ("source", "reader"))
    p.fill_random()
    p.core.set_peer(d.ref, KEY, tcp_host="127.0.0.1", tcp_port=0, unix_path="")
    ends: collections.Counter[str] = collections.Counter()
    while ends.total() < wanted:
        flip = OneFlip(chance)
        granted, filled = chance.sample(range(BLOCKS), ASKED), chance.sample(range(BLOCKS), ASKED)
        d.fill(POISON)
        with BendingProxy(p.core.tcp_port, flip) as proxy:
            d.core.set_peer(p.ref, KEY, tcp_host="127.0.0.1", tcp_port=proxy.port, unix_path="")
            transfer = d.pull_granted(p, granted, filled, lanes=STREAM, deadline_s=DEADLINE_S)
            final = d.wait_drained(transfer)
            is_committed = final.state == COMMITTED
            told = f"seed {seed}, {ends.total()} flips, byte {flip.at}: {final.code.name} {final.text}"
            assert is_committed or final.code.name in CODES, told
            assert not is_committed or d.content(filled) == p.content(granted), told
            rest = [block for block in range(BLOCKS) if block not in filled]
            assert set(b"".join(d.content(rest))) == {POISON}, told
            if not is_committed:
                p.core.end_grant(transfer, native.GrantEvent.REVOKE)
            p.wait(lambda _: p.is_idle(), "the blocks of the source")
        if flip.has_hit:
            ends["ok" if is_committed else final.code.name] += 1
        for node in (p, d):
            node.take()
            node.events.clear()
    assert ends["checksum"] > 0
    assert ends["ok"] > 0
    assert d.is_idle()
