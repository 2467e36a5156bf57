"""A machine on the way attacks single records of an encrypted session, by seed and counted: no byte that it made lands,
a transfer commits with the right bytes or ends by a documented code, and a clean connection is all that it needs.
"""

from __future__ import annotations

import collections
import os
import random
import resource
import time
from typing import Any

import pytest

from kvxfer._native import _core as native
from tests.support.native.nodes import POISON, Node
from tests.support.native.record_proxy import FROM, KINDS, TO, Attack, RecordProxy

STREAM = [native.Lane.STREAM]
COMMITTED = native.TransferState.COMMITTED
BLOCKS, BLOCK_BYTES = 8, 40_000
KEY = b"the secret key of this one pair."
MARK = b"plain bytes of a block"
SECOND_NS = 1_000_000_000
RECORDS_MOST = {TO: 10, FROM: 26}
"""A transfer of four blocks with its handshake has no more of each way."""
HELD_KIB_MAX = 96 * 1024
"""What all attacks together may leave in memory."""
DEADLINE_S = 8.0
"""Of one transfer. All attacks but one cost less than a second."""


def attacked_pair(nodes: Any, proxy_of: Any = RecordProxy) -> tuple[Node, Node, RecordProxy]:
    """A source, a reader and what is between them: a stalled session is given up after 0.15 s, a peer after 20 s."""
    limits = nodes.limits(stall_ns=SECOND_NS * 15 // 100, reconnect_ns=20 * SECOND_NS, handshake_ns=SECOND_NS // 4)
    shape: dict[str, Any] = {"blocks": BLOCKS, "block_bytes": BLOCK_BYTES, "has_unix": False, "limits": limits}
    p, d = (nodes(name, core={"encrypt": "always"}, **shape) for name in ("source", "reader"))
    p.fill_random(seed=7)
    for block in range(BLOCKS):
        p.memory[block * BLOCK_BYTES : block * BLOCK_BYTES + len(MARK)] = list(MARK)
    proxy = proxy_of(p.core.tcp_port)
    d.core.set_peer(p.ref, KEY, tcp_host="127.0.0.1", tcp_port=proxy.port, unix_path="")
    p.core.set_peer(d.ref, KEY, tcp_host="127.0.0.1", tcp_port=0, unix_path="")
    return p, d, proxy


def assert_only_right_bytes(p: Node, d: Node, granted: list[int], filled: list[int], *, is_committed: bool) -> None:
    for block in range(BLOCKS):
        found = d.memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        if block not in filled:
            assert (found == POISON).all(), "a byte landed in a block that no transfer asked for"
            continue
        origin = granted[filled.index(block)]
        right = p.memory[origin * BLOCK_BYTES : (origin + 1) * BLOCK_BYTES]
        matches = found == right
        assert (matches if is_committed else matches | (found == POISON)).all(), "a wrong byte landed"


def attack_until(nodes: Any, seed: int, wanted: int) -> collections.Counter[str]:
    """Attack records until ``wanted`` attacks have hit. Returns how many hit, by kind."""
    chance = random.Random(seed)
    hits: collections.Counter[str] = collections.Counter()
    p, d, proxy = attacked_pair(nodes)
    plain: list[str] = []
    proxy.watched = lambda way, data: plain.append(way) if MARK in data or KEY in data else None
    with proxy:
        texts: list[str] = []
        while sum(hits.values()) < wanted:
            kind = KINDS[sum(hits.values()) % len(KINDS)]
            way = chance.choice((TO, FROM, FROM))
            if chance.random() < 0.4:
                proxy.hang_up()
            attack = Attack(kind, way, chance.randrange(RECORDS_MOST[way]), random.Random(chance.random()))
            granted, filled = chance.sample(range(BLOCKS), 4), chance.sample(range(BLOCKS), 4)
            d.fill(POISON)
            proxy.arm(attack)
            begun_s = time.monotonic()
            transfer = d.pull_granted(p, granted, filled, lanes=STREAM, deadline_s=DEADLINE_S)
            final = d.wait_drained(transfer)
            told = f"seed {seed}, {sum(hits.values())} hits, {attack}: {final.code.name} {final.text}"
            is_committed = final.state == COMMITTED
            assert is_committed or (kind, final.code) == ("truncate", native.Code.deadline), told
            assert time.monotonic() - begun_s < DEADLINE_S + 1, told
            assert_only_right_bytes(p, d, granted, filled, is_committed=is_committed)
            hits[kind] += attack.has_hit
            if kind == "truncate":  # neither end can know that the rest of a record will not come
                proxy.hang_up()
                p.core.end_grant(transfer, native.GrantEvent.REVOKE)
            texts += [event.text for node in (p, d) for event in node.find(native.SessionRefused)]
            for node in (p, d):
                node.events.clear()
        p.wait(lambda _: p.take() or p.is_idle(), "the source to have all its blocks back")
        assert d.is_idle()
    assert not [text for text in texts if KEY.hex() in text or KEY.decode() in text]
    assert not plain, "bytes of a block passed without encryption"
    return hits


def held_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize(
    ("seed", "wanted"),
    [
        pytest.param(1, 28, id="28"),
        pytest.param(2, 100, id="100", marks=pytest.mark.deep),
        *(pytest.param(seed, 1000, id=f"1000-of-seed-{seed}", marks=pytest.mark.nightly) for seed in (3, 4)),
    ],
)
def test_no_record_that_was_attacked_is_believed(nodes: Any, seed: int, wanted: int) -> None:
    before_kib = held_kib()
    hits = attack_until(nodes, seed, wanted)
    assert sum(hits.values()) == wanted
    assert set(hits) == set(KINDS), f"these attacks hit nothing: {set(KINDS) - set(hits)}"
    if "KVXFER_SANITIZED" not in os.environ:  # a sanitizer keeps what was freed
        assert held_kib() - before_kib < HELD_KIB_MAX
