"""The engine that gave a Response keeps it: what names it goes there, or is told plainly that it is not known."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from kvxfer.openai.errors import RequestError
from kvxfer.policy.keylimits import KeyLimits
from kvxfer.router import responses
from kvxfer.router.auth import ApiKeys
from kvxfer.router.fleet.facts import EngineIdentity
from kvxfer.router.group.segment import SharedCounts
from kvxfer.router.keyfile import KeyEntry, digest_of
from kvxfer.router.responses import KEPT_MAX, KeptResponses, id_said
from kvxfer.types import AgentRef, Incarnation, Role
from tests.support.fake_workers import MODEL, Running, router_over
from tests.support.response_keepers import Keeper, first_id


def ref(name: str, number: int = 1) -> AgentRef:
    return AgentRef(name, Incarnation(number, bytes(16)))


async def respond(router: Running, key: str = "", **more: Any) -> Any:
    shown = {"authorization": f"Bearer {key}"} if key else {}
    return await router.client.post("/v1/responses", json={"model": MODEL, "input": "hi", **more}, headers=shown)


def four() -> list[Keeper]:
    return [Keeper(f"e{number}") for number in range(4)]


def halves() -> list[Keeper]:
    """D answers alone what goes on from a Response that it keeps."""
    return [Keeper("p", Role.PREFILL, "vllm"), *(Keeper(f"d{number}", Role.DECODE, "vllm") for number in range(4))]


@pytest.mark.parametrize("fleet", [four, halves])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_names_a_response_goes_where_it_is_kept(fleet: Any, stream: bool) -> None:
    fakes = fleet()
    async with router_over(*fakes) as router:
        for _ in range(3):
            made = first_id(await respond(router, stream=stream))
            [keeper] = [fake for fake in fakes if made in fake.kept]
            for _ in range(8):
                again = await respond(router, previous_response_id=made, stream=stream)
                assert again.status_code == 200, again.text
                assert again.headers["x-kvxfer-prefill-reason"] == "field:previous_response_id"
                assert first_id(again) in keeper.kept
            path = f"/v1/responses/{made}"
            assert (await router.client.get(path)).json()["by"] == keeper.name
            assert (await router.client.get(path + "?stream=false")).json()["id"] == made
            assert (await router.client.get(path + "/input_items")).json()["id"] == made
            assert (await router.client.post(path + "/cancel")).json()["id"] == made
            assert (await router.client.delete(path)).status_code == 200
            assert (await router.client.get(path)).status_code == 404
            assert made not in keeper.kept


async def test_the_first_event_waits_for_no_prefill_worker_and_its_response_is_known_at_once() -> None:
    """P may answer late, and a client may cancel what has only begun."""
    p, d = Keeper("p", Role.PREFILL, "vllm"), Keeper("d", Role.DECODE, "vllm")
    p.ends, d.ends = asyncio.Event(), asyncio.Event()
    async with router_over(p, d, min_remote_prefill_tokens=0) as router:
        body = {"model": MODEL, "input": "hi", "stream": True}
        async with asyncio.timeout(20), router.client.stream("POST", "/v1/responses", json=body) as answer:
            assert answer.headers["x-kvxfer-prefill"] == "remote"
            lines = answer.aiter_lines()
            text = ""
            while "response.output_text.delta" not in text:
                text += await anext(lines) + "\n"
            assert text.startswith("event: response.created")
            [made] = d.kept
            other = await router.client.get(f"/v1/responses/{made}")
            assert other.json()["by"] == "d"
            assert not p.ends.is_set()
            d.ends.set()


async def test_one_that_is_not_known_is_404_with_a_sentence() -> None:
    fakes = four()
    async with router_over(*fakes) as router:
        unstored = first_id(await respond(router, store=False))
        asked = [len(fake.asked) for fake in fakes]
        for name in ("resp_unknown", unstored, "x" * 300, "\u00e9"):
            answer = await respond(router, previous_response_id=name)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (404, "response_not_found"), answer.text
            assert error["param"] == "previous_response_id"
            assert "not stored" in error["message"]
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            answer = await router.client.request(method, "/v1/responses/resp_unknown" + path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
        assert [len(fake.asked) for fake in fakes] == asked


@pytest.mark.parametrize("wrong", [["resp_1"], {"id": "resp_1"}, 3, True])
async def test_a_previous_response_that_is_no_text_is_400_by_name(wrong: Any) -> None:
    fakes = four()
    async with router_over(*fakes) as router:
        answer = await respond(router, previous_response_id=wrong)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "previous_response_id"), answer.text
        assert not any(fake.asked for fake in fakes)
        assert (await respond(router, previous_response_id=None)).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/responses/..", "/v1/responses/a/b", "/v1/responses/a/cancel/x", "/v1/responses/%2e%2e/metrics"]
)
async def test_no_other_path_reaches_an_engine(path: str) -> None:
    fakes = four()
    async with router_over(*fakes) as router:
        for method in ("GET", "DELETE", "POST"):
            assert (await router.client.request(method, path)).status_code in (404, 405)
        assert not any(fake.asked for fake in fakes)


async def test_a_replaced_worker_took_its_responses_with_it() -> None:
    fakes = four()
    async with router_over(*fakes) as router:
        made = first_id(await respond(router))
        [keeper] = [fake for fake in fakes if made in fake.kept]
        keeper.incarnation = Incarnation(keeper.incarnation.number + 100, bytes(16))
        router.publish(*fakes)
        for answer in (
            await respond(router, previous_response_id=made),
            await router.client.get(f"/v1/responses/{made}"),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
            assert "is gone" in answer.json()["error"]["message"]


async def test_one_worker_alone_is_asked_for_what_the_router_does_not_remember() -> None:
    """A router that was restarted, or another one before the same engine."""
    fake = Keeper("e0")
    fake.kept["resp_old"] = {"id": "resp_old", "by": "e0"}
    async with router_over(fake) as router:
        assert (await router.client.get("/v1/responses/resp_old")).status_code == 200
        assert (await respond(router, previous_response_id="resp_old")).status_code == 200
        assert (await router.client.get("/v1/responses/resp_other")).json()["error"]["message"] == "not here"


async def test_a_draining_worker_is_asked_for_its_responses_and_gets_no_follow_up() -> None:
    fakes = four()
    async with router_over(*fakes) as router:
        made = first_id(await respond(router))
        [keeper] = [fake for fake in fakes if made in fake.kept]
        router.workers.drain(keeper.name)
        assert (await router.client.get(f"/v1/responses/{made}")).status_code == 200
        assert (await respond(router, previous_response_id=made)).status_code == 503


async def test_local_prefill_off_refuses_a_follow_up_by_its_field() -> None:
    async with router_over(*halves(), local_prefill="off") as router:
        made = first_id(await respond(router))
        answer = await respond(router, previous_response_id=made)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "previous_response_id")


async def test_a_response_is_its_own_keys_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another key that learnt the id reads, cancels, deletes and goes on from nothing, and cannot claim the id."""
    keys = ApiKeys()
    keys.replace([KeyEntry(name, (digest_of(name.encode()),), KeyLimits()) for name in ("mine", "other")])
    fake = Keeper("e0")
    async with router_over(fake, keys=keys) as router:
        made = first_id(await respond(router, "mine"))
        other = {"authorization": "Bearer other"}

        async def refused() -> None:
            for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
                answer = await router.client.request(method, f"/v1/responses/{made}{path}", headers=other)
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
            answer = await respond(router, "other", previous_response_id=made)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")

        await refused()
        claimed = await respond(router, "other", request_id=made)
        assert claimed.json()["id"] != made
        assert "request_id" not in fake.bodies[-1]
        await refused()
        mine = {"authorization": "Bearer mine"}
        assert (await router.client.get(f"/v1/responses/{made}", headers=mine)).json() == fake.kept[made]
        assert (await router.client.get(f"/v1/responses/{made}")).status_code == 401


async def test_a_key_of_some_models_reaches_no_response_of_another_model() -> None:
    keys = ApiKeys()
    entry = KeyEntry("mine", (digest_of(b"mine"),), KeyLimits())
    keys.replace([entry])
    async with router_over(Keeper("e0"), keys=keys) as router:
        made = first_id(await respond(router, "mine"))
        keys.replace([dataclasses.replace(entry, models=frozenset({"another"}))])
        answer = await router.client.get(f"/v1/responses/{made}", headers={"authorization": "Bearer mine"})
        assert answer.status_code == 403


async def test_a_follow_up_of_a_model_that_its_worker_does_not_serve_is_refused_by_the_field() -> None:
    one, other = Keeper("e0"), Keeper("e1", model="other")
    async with router_over(one, other) as router:
        made = first_id(await respond(router))
        answer = await respond(router, previous_response_id=made, model="other")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


async def test_a_key_of_an_adapter_alone_reaches_its_responses() -> None:
    keys = ApiKeys()
    keys.replace([KeyEntry("mine", (digest_of(b"mine"),), KeyLimits(), frozenset({"adapter"}))])
    async with router_over(Keeper("e0"), keys=keys) as router:
        [entry] = router.workers.entries()
        router.workers.learn(entry, identity=EngineIdentity(models=(MODEL, "adapter")))
        made = first_id(await respond(router, "mine", model="adapter"))
        mine = {"authorization": "Bearer mine"}
        assert (await router.client.get(f"/v1/responses/{made}", headers=mine)).json()["id"] == made


def test_the_oldest_are_forgotten_first_within_the_bound() -> None:
    kept, known = KeptResponses(), [ref("a"), ref("b")]
    for number in range(KEPT_MAX + 10):
        kept.note(f"resp_{number}", b"k", known[number % 2])
    found = [kept.find(f"resp_{number}", b"k", known) for number in (0, 9, 10, 11, KEPT_MAX + 9)]
    assert found == [None, None, known[0], known[1], known[1]]
    assert kept.find("resp_11", b"another", known) is None
    with pytest.raises(RequestError, match="is gone"):
        kept.find("resp_11", b"k", [ref("b", 2)])


def test_all_processes_of_a_router_remember_what_one_noted_also_after_its_end() -> None:
    segment = SharedCounts.make(3)
    first, second = (KeptResponses(segment.responses, row) for row in (0, 1))
    first.note("resp_1", b"k", ref("a"))
    second.note("resp_2", b"k", ref("b"))
    for kept in (first, second):
        assert [kept.find(name, b"k", [ref("a"), ref("b")]) for name in ("resp_1", "resp_2")] == [ref("a"), ref("b")]
    segment.clear(0)
    again = KeptResponses(segment.responses, 0)
    again.note("resp_3", b"k", ref("a"))
    assert [second.find(f"resp_{number}", b"k", [ref("a")]) for number in (1, 3)] == [ref("a"), ref("a")]
    assert not segment.keys.any()
    assert segment.inflight(0) == 0
    segment.close()


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"id":7}', b'{"response":{}}', b'{"response":{"id":null}}', b"\xff", b"[" * 999]
)
def test_an_answer_without_an_id_is_not_remembered(content: bytes) -> None:
    assert id_said(content) == ""
    kept = KeptResponses()
    seen = responses.ResponseSeen(kept, b"")
    seen.note(content, ref("a"))
    assert not seen.begins(b"response.created" + content, ref("a"))
    assert repr(kept) == "KeptResponses(noted=0)"


def test_an_id_that_no_path_can_have_is_not_remembered() -> None:
    kept = KeptResponses()
    for name in ("", "a/b", "..", "a b", "\u00e9", "x" * 257, "a?b", "a%2fb"):
        kept.note(name, b"", ref("a"))
    assert repr(kept) == "KeptResponses(noted=0)"
