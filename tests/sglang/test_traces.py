"""Spans join those of SGLang's requests: its queues make senders and receivers, and its tracer exports."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.connectors.sglang import observability_0_5_23 as observability
from kvxfer.observe import Span, next_traceparent, spans_to
from tests.support.sglang.ranks import SUCCESS, World, give, send, start, wait, wait_for

propagate = pytest.importorskip("opentelemetry.propagate")


@pytest.fixture
def seen() -> Iterator[list[Span]]:
    seen: list[Span] = []
    with spans_to(seen.append):
        yield seen


def traced(traceparent: str, *, is_async: bool) -> Any:
    """A request as SGLang's scheduler has it, as far as it is asked for its trace."""
    context = SimpleNamespace(tracing_enable=True, root_span_context=propagate.extract({"traceparent": traceparent}))
    if is_async:
        context = SimpleNamespace(tracing_enable=True, _root_span_carrier={"traceparent": traceparent})
    return SimpleNamespace(
        rid="r",
        origin_input_ids=[1] * 16,
        sampling_params=SimpleNamespace(max_new_tokens=5),
        disagg_prefill_dp_rank=None,
        time_stats=SimpleNamespace(trace_ctx=context),
        bootstrap_host="127.0.0.1",
        bootstrap_port=0,
    )


def queue_of(kind: type, manager: Any, port: int) -> Any:
    from sglang.srt.disaggregation.utils import TransferBackend

    queue: Any = kind.__new__(kind)
    queue.kv_manager, queue.transfer_backend, queue.bootstrap_port = manager, TransferBackend("kvxfer"), port
    queue.max_input_len, queue.queue = 1000, []
    return queue


@pytest.mark.parametrize("is_async", [False, True])
def test_spans_are_children_of_the_requests(world: World, seen: list[Span], is_async: bool) -> None:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue

    theirs, ours, room = next_traceparent(None), next_traceparent(None), world.room()
    asked, wanted = traced(theirs, is_async=is_async), traced(ours, is_async=is_async)
    asked.bootstrap_room = wanted.bootstrap_room = room
    wanted.bootstrap_port = world.port
    queue_of(PrefillBootstrapQueue, world.prefill.manager, world.port).create_sender(asked, 2)
    receiving = queue_of(DecodePreallocQueue, world.decode.manager, world.port)._create_receiver_and_enqueue(wanted)
    sender, receiver = asked.disagg_kv_sender, receiving.kv_receiver
    world.decode.greet(receiver)
    give(receiver, [5], 1)
    start(sender, 1, 1)
    send(sender, [5])
    wait_for(receiver, SUCCESS)
    wait_for(sender, SUCCESS)
    sender.clear()
    receiver.clear()
    wait(lambda: {span.name for span in seen} == {"kvxfer.send", "kvxfer.grant", "kvxfer.load"})
    # SGLang's context has no flags of a span that it did not make itself
    parents = {span.name: str(span.parent)[:52] for span in seen}
    assert parents == {"kvxfer.send": theirs[:52], "kvxfer.grant": theirs[:52], "kvxfer.load": ours[:52]}
    plain = world.prefill.sender(world.room())
    assert world.prefill.manager.take_traceparent() is None, "of no other request"
    plain.abort()


@pytest.mark.parametrize("context", [None, SimpleNamespace(tracing_enable=False), SimpleNamespace(tracing_enable=True)])
def test_requests_that_are_not_traced_have_no_parent(context: Any) -> None:
    assert observability.traceparent_of(SimpleNamespace(time_stats=SimpleNamespace(trace_ctx=context))) is None
    assert observability.traceparent_of(SimpleNamespace()) is None


class Tracer:
    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []

    def start_span(self, name: str, **values: Any) -> Any:
        self.made.append({"name": name, **values})
        return SimpleNamespace(end=lambda end_time: self.made[-1].update(end_time=end_time))


def test_sglangs_tracer_exports_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry import trace

    tracer, parent = Tracer(), next_traceparent(None)
    monkeypatch.setattr(observability.sglang_trace, "tracer", tracer)
    observability.export(Span("kvxfer.load", 1000, 7, {"room": 5}, "peer_gone", parent))
    observability.export(Span("kvxfer.load", 1000, 7, {"room": 5}, None, None))
    [made] = tracer.made
    context = trace.get_current_span(made.pop("context")).get_span_context()
    assert f"{context.trace_id:032x}-{context.span_id:016x}" == parent[3:52]
    attributes = {"kvxfer.room": 5, "error.type": "peer_gone"}
    assert made == {"name": "kvxfer.load", "start_time": 1000, "end_time": 1007, "attributes": attributes}
