"""One pull between the endpoints ``a`` and ``b`` of a pair, step by step."""

from __future__ import annotations

from typing import Any

from kvxfer._native import _core
from kvxfer.testing.sim.virtual_clock import S

ID = b"t" * 16


def pull(pair: Any, id_: bytes = ID, *, count: int = 2, lane: Any = _core.Lane.MEMORY, at: int = 0) -> None:
    blocks = list(range(at, at + count))
    b = pair.ends["b"]
    pair.do("b", b.pull(id_, pair.refs["a"], 1, blocks, 0, [lane], pair.now + 600 * S, 7, pair.now))


def grant(pair: Any, id_: bytes = ID, *, count: int = 2, at: int = 0, ttl_ns: int = 10 * S) -> None:
    a = pair.ends["a"]
    pair.do("a", a.grant(id_, 1, list(range(at, at + count)), "b", ttl_ns, count, pair.now))
    pair.do("a", a.ready(id_, count, 0, True, pair.now))


def land(pair: Any) -> None:
    for read in pair.take("b", _core.ReadBlocks):
        pair.do("b", pair.ends["b"].read_landed(read.id, read.token, pair.now))


def finals(pair: Any) -> list[tuple[str, str]]:
    return [(e.state.name, e.code.name) for e in pair.take("b", _core.TransferFinal)]
