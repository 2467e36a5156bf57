"""Every way in which a request can go wrong, over real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal

import httpx
import pytest

from kvxfer.types import Membership, Role
from tests.support import child
from tests.support.fake_workers import (
    FakeWorker,
    broken,
    events,
    eventually,
    failing,
    free_port,
    router_over,
    texts,
)

OVERLOADED = failing(503, "overloaded", retryable=True)


def prefiller(name: str = "p0") -> FakeWorker:
    return FakeWorker(name, Role.PREFILL)


async def test_no_decode_worker_is_a_503_that_says_when_to_come_back() -> None:
    async with router_over(prefiller()) as router:
        for answer in (await router.complete(), await router.chat(stream=True)):
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "no_worker"
            assert answer.json()["error"]["retryable"]
        router.workers.update(Membership(2))
        assert (await router.complete()).status_code == 503


async def test_no_prefill_worker_lets_the_decoder_compute_the_prompt() -> None:
    d = FakeWorker("d0")
    async with router_over(d) as router:
        answer = await router.complete(stream=True)
        assert answer.status_code == 200
        assert answer.headers["x-kvxfer-prefill"] == "local"
        assert answer.headers["x-kvxfer-prefill-reason"] == "no_prefill_worker"
        assert "kv_transfer_params" not in d.received[0].body
    async with router_over(d, local_prefill="off") as router:
        answer = await router.complete()
        assert answer.status_code == 503
        assert "local prefill is off" in answer.json()["error"]["message"]


async def test_a_worker_of_both_roles_alone_prefills_locally() -> None:
    both = FakeWorker("b0", Role.BOTH)
    async with router_over(both) as router:
        answer = await router.complete()
        assert answer.headers["x-kvxfer-prefill"] == "local"
        assert answer.headers["x-kvxfer-prefill-reason"] == "only_itself"


async def test_draining_workers_get_nothing() -> None:
    d = FakeWorker("d0")
    async with router_over(d) as router:
        router.publish(d, is_draining=True)
        assert (await router.complete()).status_code == 503
        router.publish(d)
        assert (await router.complete()).status_code == 200


async def test_suspects_get_nothing_unless_all_are_suspects() -> None:
    """A coordinator that was cut off for a moment suspects all, and no request has to fail for that."""
    suspect, live = FakeWorker("d0"), FakeWorker("d1")
    async with router_over(suspect, live) as router:
        router.workers.update(Membership(1, (dataclasses.replace(suspect.member, is_suspect=True), live.member)))
        for _ in range(8):
            assert (await router.complete()).status_code == 200
        assert not suspect.received
        assert live.received
        router.publish(suspect, live, is_suspect=True)
        for _ in range(8):
            assert (await router.complete()).status_code == 200
        assert suspect.received


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("failure", [OVERLOADED, failing(500, "internal", retryable=False), (502, b"<html>")])
async def test_a_failing_decoder_is_replaced_under_a_new_transfer_id(
    failure: tuple[int, object], is_stream: bool
) -> None:
    p, decoders = prefiller(), [FakeWorker("d0"), FakeWorker("d1")]
    for d in decoders:
        d.failures = [failure]
        d.hold = asyncio.Event()
        d.hold.set()
    async with router_over(p, *decoders) as router:
        decoders[1].failures = []
        while not decoders[0].received:
            answer = await router.complete(stream=is_stream)
            assert answer.status_code == 200
        assert answer.headers["x-kvxfer-attempt"] == "2"
        first = decoders[0].received[0].params
        second = decoders[1].received[-1].params
        assert first is not None
        assert second is not None
        assert (first["attempt"], second["attempt"]) == (1, 2)
        assert first["transfer_id"] != second["transfer_id"]
        assert {leg.params["transfer_id"] for leg in p.received[-2:] if leg.params} == {
            first["transfer_id"],
            second["transfer_id"],
        }


# As vLLM answers: the code is the status again.
UNEXPLAINED = (500, {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}})
UNSUPPORTED = (501, {"error": {"message": "this model has no logprobs", "type": "NotImplementedError", "code": 501}})


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_decoder_that_gives_no_reason_may_have_been_let_down_by_its_prefiller(is_stream: bool) -> None:
    prefillers, d = [prefiller("p0"), prefiller("p1")], FakeWorker("d0")
    d.failures = [UNEXPLAINED]
    async with router_over(*prefillers, d) as router:
        answer = await router.complete(stream=is_stream)
        assert (answer.status_code, answer.headers["x-kvxfer-attempt"]) == (200, "2")
        sources = [leg.params["source"]["agent_id"] for leg in d.received if leg.params]
        assert sorted(sources) == ["p0", "p1"]
        d.always_fails = failing(500, "internal", retryable=False)  # a reason: its own
        assert (await router.complete(stream=is_stream)).status_code == 500
        assert len(d.received) == 3


async def test_a_pair_that_gives_no_reason_is_tried_no_more_often_than_others() -> None:
    p, d = prefiller(), FakeWorker("d0")
    d.always_fails = UNEXPLAINED
    async with router_over(p, d) as router:
        assert (await router.complete()).status_code == 500
        assert (len(d.received), len(p.received)) == (2, 1)  # the second time it is to compute the prompt itself
        d.always_fails = UNSUPPORTED  # says what is wrong, and it is nothing that P did
        assert (await router.complete()).status_code == 501
        assert len(d.received) == 3
    async with router_over(d) as router:
        d.always_fails = UNEXPLAINED
        assert (await router.complete()).status_code == 500
        assert len(d.received) == 4  # alone: its own fault


async def test_the_old_prefill_leg_is_ended_before_the_new_one_begins() -> None:
    p, d = prefiller(), FakeWorker("d0")
    p.hold = asyncio.Event()
    d.failures = [OVERLOADED]
    async with router_over(p, d) as router:
        answer = await router.complete()
        assert answer.status_code == 200
        assert answer.headers["x-kvxfer-attempt"] == "2"
        await asyncio.wait_for(p.received[0].left.wait(), 1.0)


async def test_the_only_decoder_is_asked_again_if_that_may_help_and_not_for_ever() -> None:
    d = FakeWorker("d0")
    d.failures = [OVERLOADED, OVERLOADED]
    async with router_over(d) as router:
        assert (await router.complete()).status_code == 200
        assert len(d.received) == 3
        d.always_fails = OVERLOADED
        answer = await router.complete()
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "overloaded"
        assert len(d.received) == 6
        assert await router.metric('kvxfer_router_retries_total{reason="overloaded"}') == 4
        d.always_fails = failing(500, "internal", retryable=False)
        answer = await router.complete()
        assert answer.status_code == 500
        assert len(d.received) == 7
        d.always_fails = (500, b"Traceback (most recent call last): http://10.0.0.1/secret")
        answer = await router.complete()
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "the decode worker answered 500"


@pytest.mark.parametrize("is_stream", [True, False])
async def test_an_unreachable_decoder_is_replaced_and_then_tried_last(is_stream: bool) -> None:
    live, dead = FakeWorker("d0"), FakeWorker("d1")
    async with router_over(live) as router:
        dead.port = free_port()
        router.publish(live, dead)
        while not await router.metric("kvxfer_router_workers_ejected"):
            answer = await router.complete(stream=is_stream)
            assert answer.status_code == 200
        assert answer.headers["x-kvxfer-attempt"] == "2"
        assert (await router.complete()).headers["x-kvxfer-attempt"] == "1"
        router.publish(dead)
        answer = await router.complete()
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "peer_gone"
        assert "127.0.0.1" not in answer.text


async def test_a_decoder_lost_before_its_first_token_is_replaced() -> None:
    cut, live = FakeWorker("d0"), FakeWorker("d1")
    cut.cut_after = 0
    async with router_over(cut, live) as router:
        for _ in range(20):
            for answer in (await router.chat(stream=True), await router.chat()):
                assert answer.status_code == 200
                if "data:" in answer.text:
                    assert texts(events(answer.text)) == "one two three"
            if cut.received:
                break
            router.publish(cut, live)
        assert cut.received


async def test_a_first_error_event_is_retried_or_becomes_a_plain_error() -> None:
    d = FakeWorker("d0")
    d.first_event = failing(502, "grant_expired", retryable=False)[1]
    async with router_over(d) as router:
        answer = await router.complete(stream=True)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "grant_expired"
        d.first_event = failing(502, "grant_expired", retryable=True)[1]
        assert (await router.complete(stream=True)).status_code == 500
        assert len(d.received) == 4


async def test_a_decoder_lost_mid_stream_ends_it_with_one_error_event() -> None:
    p, d = prefiller(), FakeWorker("d0")
    d.cut_after = 2
    d.delay_s = 0.05
    async with router_over(p, d) as router:
        answer = await router.chat(stream=True)
        assert answer.status_code == 200
        chunks = events(answer.text)
        assert texts(chunks) == "one two"
        error = broken(chunks)
        assert (error["code"], error["type"], error["retryable"]) == ("peer_gone", "server_error", True)
        await router.wait_metric(
            'kvxfer_router_requests_total{outcome="broken_stream",route="/v1/chat/completions"}', 1
        )
        d.cut_after = None
        assert (await router.chat(stream=True)).status_code == 200
        assert len(d.received) == 2


async def test_a_stream_that_ends_without_done_is_broken_too() -> None:
    d = FakeWorker("d0")
    d.sends_done = False
    async with router_over(d) as router:
        chunks = events((await router.complete(stream=True)).text)
        assert broken(chunks)["code"] == "peer_gone"


async def test_a_killed_decoder_process_ends_the_stream_well_formed_and_the_router_goes_on() -> None:
    process = await asyncio.create_subprocess_exec(
        *child.command("fake_workers", "d-killed"),
        stdout=asyncio.subprocess.PIPE,
        env=child.environment(),
    )
    try:
        assert process.stdout is not None
        killed = FakeWorker("d-killed")
        killed.port = int(await asyncio.wait_for(process.stdout.readline(), 60.0))
        p, live = prefiller(), FakeWorker("d-live")
        async with router_over(p, live) as router:
            router.publish(p, killed)
            text = ""
            body = {"model": "tiny", "prompt": "hi", "stream": True}
            async with router.client.stream("POST", "/v1/completions", json=body) as answer:
                async for part in answer.aiter_text():
                    text += part
                    if text.count("\n\n") == 5:
                        os.kill(process.pid, signal.SIGKILL)
            chunks = events(text)
            assert broken(chunks)["code"] == "peer_gone"
            assert len(chunks) > 5
            router.publish(p, killed, live)
            for _ in range(4):
                assert texts(events((await router.complete(stream=True)).text)) == "one two three"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_an_incarnation_that_the_coordinator_ends_is_not_waited_for() -> None:
    hung, live = FakeWorker("d0"), FakeWorker("d1")
    hung.hold = asyncio.Event()
    async with router_over(hung, live) as router:
        router.publish(hung)
        pending = asyncio.create_task(router.complete())
        await asyncio.wait_for(hung.arrived.wait(), 5.0)
        router.publish(live)
        answer = await asyncio.wait_for(pending, 5.0)
        assert answer.status_code == 200
        assert answer.headers["x-kvxfer-attempt"] == "2"

        live.tokens = [str(number) for number in range(1000)]
        live.delay_s = 0.02
        text = ""
        body = {"model": "tiny", "prompt": "hi", "stream": True}
        async with router.client.stream("POST", "/v1/completions", json=body) as streamed:
            async for part in streamed.aiter_text():
                if not text:
                    router.publish()
                text += part
        assert broken(events(text))["code"] == "peer_gone"


async def test_a_lost_prefiller_is_left_to_the_decoder() -> None:
    p, d = prefiller(), FakeWorker("d0")
    d.hold = asyncio.Event()
    p.always_fails = failing(500, "internal", retryable=False)
    async with router_over(p, d) as router:
        pending = asyncio.create_task(router.complete(stream=True))
        await asyncio.wait_for(d.arrived.wait(), 5.0)
        await router.wait_metric('kvxfer_router_leg_failures_total{kind="error",part="prefill"}', 1)
        assert not d.received[0].left.is_set()
        d.hold.set()
        answer = await pending
        assert answer.status_code == 200
        assert answer.headers["x-kvxfer-attempt"] == "1"
        assert len(d.received) == 1
        [account] = [chunk["kvxfer"] for chunk in events(answer.text)[:-1] if "kvxfer" in chunk]
        assert account["prefill_failure"] == "internal"


async def test_a_prefiller_that_takes_nothing_starts_a_new_attempt() -> None:
    p, d = prefiller(), FakeWorker("d0")
    p.failures = [OVERLOADED]
    d.hold = asyncio.Event()
    async with router_over(p, d) as router:
        pending = asyncio.create_task(router.complete())
        await asyncio.wait_for(d.arrived.wait(), 5.0)
        await asyncio.wait_for(d.received[0].left.wait(), 5.0)
        d.hold.set()
        answer = await pending
        assert answer.status_code == 200
        assert answer.headers["x-kvxfer-attempt"] == "2"
        assert answer.headers["x-kvxfer-prefill"] == "local"
        assert "kv_transfer_params" not in d.received[1].body


async def test_a_prefiller_that_is_shutting_down_is_not_left_to_the_decoder() -> None:
    """It granted nothing and never will: a decoder would wait at its agent for as long as a pull may wait."""
    p, d = prefiller(), FakeWorker("d0")
    p.failures = [failing(503, "closed", retryable=False)]
    d.hold = asyncio.Event()
    async with router_over(p, d) as router:
        pending = asyncio.create_task(router.complete())
        await asyncio.wait_for(d.arrived.wait(), 5.0)
        await asyncio.wait_for(d.received[0].left.wait(), 5.0)
        d.hold.set()
        answer = await pending
        assert answer.status_code == 200
        assert answer.headers["x-kvxfer-prefill"] == "local"
        assert len(p.received) == 1


async def test_redispatch_starts_again_elsewhere_when_asked_to() -> None:
    p, other, d = prefiller("p0"), prefiller("p1"), FakeWorker("d0")
    p.always_fails = failing(500, "internal", retryable=False)
    d.hold = asyncio.Event()
    async with router_over(p, other, d, on_prefill_failure="redispatch") as router:
        router.publish(p, d)
        pending = asyncio.create_task(router.complete())
        await asyncio.wait_for(d.arrived.wait(), 5.0)
        router.publish(p, other, d)
        d.hold.set()
        assert (await pending).status_code == 200


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_leaves_takes_both_legs_with_it(when: str, is_stream: bool) -> None:
    p, d = prefiller(), FakeWorker("d0")
    p.hold = asyncio.Event()
    d.tokens = [str(number) for number in range(1000)]
    d.delay_s = 0.02 if is_stream else 30.0
    if when == "before":
        d.hold = asyncio.Event()
    async with router_over(p, d) as router:
        async with httpx.AsyncClient(base_url=router.url, trust_env=False, timeout=30.0) as client:
            body = {"model": "tiny", "prompt": "hi", "stream": is_stream}

            async def ask() -> None:
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_bytes():
                        started.set()

            started = asyncio.Event()
            asking = asyncio.create_task(ask())
            await asyncio.wait_for(asyncio.gather(p.arrived.wait(), d.arrived.wait()), 5.0)
            if when == "during" and is_stream:
                await asyncio.wait_for(started.wait(), 5.0)
            asking.cancel()
            await asyncio.wait({asking})
        await asyncio.wait_for(asyncio.gather(p.received[0].left.wait(), d.received[0].left.wait()), 5.0)
        await router.wait_metric('kvxfer_router_requests_total{outcome="disconnected",route="/v1/completions"}', 1)
        assert router.workers.statistics().inflight == 0
        assert (await router.client.get("/health")).json()["inflight"] == 0


async def test_more_than_max_inflight_are_turned_away() -> None:
    d = FakeWorker("d0")
    d.hold = asyncio.Event()
    async with router_over(d, max_inflight=2) as router:
        pending = [asyncio.create_task(router.complete()) for _ in range(2)]
        await eventually(lambda: len(d.received) == 2)
        answer = await router.complete()
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert "max_inflight 2" in answer.json()["error"]["message"]
        d.hold.set()
        assert [(await task).status_code for task in pending] == [200, 200]

        async def is_idle() -> bool:
            return (await router.client.get("/health")).json()["inflight"] == 0

        await eventually(is_idle)
        assert (await router.complete()).status_code == 200


async def test_a_body_that_python_could_not_write_again_is_passed_on_as_it_came() -> None:
    d = FakeWorker("d0")
    async with router_over(d) as router:
        for extra in ("1e999", "[" * 900 + "]" * 900):
            body = b'{"model": "tiny", "prompt": "hi", "extra": ' + extra.encode() + b"}"
            answer = await router.client.post("/v1/completions", content=body)
            assert answer.status_code in ((200,) if extra == "1e999" else (200, 400))
            assert answer.status_code == 200 or answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_stopping_router_ends_streams_well_formed() -> None:
    d = FakeWorker("d0")
    d.tokens = [str(number) for number in range(1000)]
    d.delay_s = 0.02
    async with router_over(d) as router:
        text = ""
        body = {"model": "tiny", "prompt": "hi", "stream": True}
        async with router.client.stream("POST", "/v1/completions", json=body) as answer:
            async for part in answer.aiter_text():
                text += part
                router.stop.set()
        assert broken(events(text))["code"] == "closed"


async def test_many_at_once_are_shared_out_evenly() -> None:
    prefillers = [prefiller(f"p{number}") for number in range(2)]
    decoders = [FakeWorker(f"d{number}") for number in range(2)]
    for fake in (*prefillers, *decoders):
        fake.hold = asyncio.Event()
    async with router_over(*prefillers, *decoders) as router:
        pending = [asyncio.create_task(router.complete(stream=True)) for _ in range(20)]
        await eventually(lambda: sum(len(fake.received) for fake in (*prefillers, *decoders)) == 40)
        assert [len(fake.received) for fake in (*prefillers, *decoders)] == [10, 10, 10, 10]
        for fake in (*prefillers, *decoders):
            assert fake.hold is not None
            fake.hold.set()
        for task in pending:
            assert texts(events((await task).text)) == "one two three"


async def test_failures_of_different_requests_count_whatever_request_id_the_client_writes() -> None:
    bad, good = FakeWorker("bad", Role.BOTH, dialect="plain"), FakeWorker("good", Role.BOTH, dialect="plain")
    bad.always_fails = failing(500, "boom", retryable=False)
    body = {"model": "tiny", "prompt": "hi"}
    async with router_over(bad, good) as router:
        for _ in range(20):
            answer = await router.client.post("/v1/completions", json=body, headers={"x-request-id": "batch-job"})
            assert answer.headers["x-request-id"] == "batch-job"
        assert router.workers.counters.ejections
        assert len(bad.received) < 12
        assert {one.headers["x-request-id"] for one in (*bad.received, *good.received)} == {"batch-job"}
