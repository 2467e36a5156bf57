"""Spans of rooms: children of the requests that they are of, on both sides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvxfer.connectors.sglang.source import RoomReader
from kvxfer.observe import Span, next_traceparent, spans_to
from tests.support.sglang_core.cores import Rank, new_id, until

P, D = next_traceparent(None), next_traceparent(None)


@pytest.fixture
def seen() -> Iterator[list[Span]]:
    seen: list[Span] = []
    with spans_to(seen.append):
        yield seen


def begin(p: Rank, d: Rank, room: int, pages: tuple[int, ...]) -> str:
    transfer_id = new_id()
    d.destinations.begin(room, transfer_id, [("p", 0)], pages, 0, traceparent=D)
    p.sources.reader(room, RoomReader(transfer_id, "d", 0, len(pages)))
    p.sources.accept(room, P)
    return str(transfer_id)


def named(seen: list[Span], name: str, count: int) -> list[Span]:
    until(lambda: len([span for span in seen if span.name == name]) == count)
    return [span for span in seen if span.name == name]


def test_a_prompt_that_came_has_spans_on_both_sides(p: Rank, d: Rank, seen: list[Span]) -> None:
    transfer_id = begin(p, d, 5, (1, 2, 3))
    p.sources.send(5, 0, (7, 8), is_last=False)
    p.sources.send(5, 2, (9,), is_last=True, aux_row=0)
    d.wait("done", 5)
    p.wait("sent", 5)
    [load], [send], grants = (
        named(seen, "kvxfer.load", 1),
        named(seen, "kvxfer.send", 1),
        named(seen, "kvxfer.grant", 3),
    )
    assert load.parent == D
    assert {span.parent for span in (send, *grants)} == {P}
    assert all(span.error is None for span in seen)
    told = dict(load.attributes)
    assert told.pop("early_bytes") <= told["bytes"]
    assert told.pop("lane") in ("mapped", "unix", "cma", "stream")
    assert told == {"room": 5, "transfer_id": transfer_id, "blocks": 3, "bytes": 3 * 1536 + 640, "parts": 3}
    assert dict(send.attributes) == {"room": 5, "readers": 1, "bytes": told["bytes"]}
    assert sorted(span.attributes["blocks"] for span in grants) == [1, 1, 2]
    assert {span.attributes["transfer_id"] for span in grants} == {transfer_id}
    assert all(span.duration_ns > 0 for span in seen)


def test_a_prompt_that_did_not_come_says_why(p: Rank, d: Rank, seen: list[Span]) -> None:
    begin(p, d, 5, (1, 2))
    until(lambda: d.core.statistics().agent.pulls.queued == 1)
    p.sources.abort(5, "the client left")
    d.wait("failed", 5)
    p.sources.clear(5)
    d.destinations.clear(5)
    assert [named(seen, name, 1)[0].error for name in ("kvxfer.load", "kvxfer.send")] == ["cancelled"] * 2
