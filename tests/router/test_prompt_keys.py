"""Requests share keys where an engine would compute the same, and never across models, adapters, salts or tenants."""

from __future__ import annotations

import itertools
import json
import random
import time
from typing import Any

import pytest

from kvxfer.openai.chains import KEYS_MAX, Secret
from kvxfer.router.apis import api_of
from kvxfer.router.apis.roots import ADAPTERS, MEMBERS, SALTS
from kvxfer.router.inbound import Inbound
from kvxfer.router.prompt_keys import PromptKeys

KEYS = PromptKeys(Secret(bytes(range(16))))
TURNS = [{"role": "user", "content": "Say something."}, {"role": "assistant", "content": "Something."}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "tiny", "prompt": "Say something."},
    "/v1/chat/completions": {"model": "tiny", "messages": TURNS},
    "/v1/responses": {"model": "tiny", "input": TURNS, "instructions": "Be brief."},
    "/v1/messages": {"model": "tiny", "messages": TURNS, "system": "Be brief.", "max_tokens": 4},
    "/generate": {"text": "Say something."},
}


def inbound(path: str, body: dict[str, Any] | bytes) -> Inbound:
    api = api_of(path)
    assert api is not None
    return Inbound.read(api, body if isinstance(body, bytes) else json.dumps(body).encode())


def keys(path: str, body: dict[str, Any] | bytes, *, model: str = "", tenant: bytes = b"") -> list[int]:
    return list(KEYS.keys_of(inbound(path, body), model=model, tenant=tenant).keys)


@pytest.mark.parametrize("path", BODIES)
def test_each_field_of_a_root_parts_the_keys(path: str) -> None:
    body = BODIES[path]
    seen = set(keys(path, body))
    assert seen
    for name, value in itertools.product(MEMBERS, ("a", ["a"], 1)):
        new = keys(path, {**body, name: value})
        assert seen.isdisjoint(new), name
        seen.update(new)
    assert keys(path, {**body, **dict.fromkeys(MEMBERS)}) == keys(path, body)


@pytest.mark.parametrize("path", BODIES)
def test_what_changes_only_the_answer_parts_none(path: str) -> None:
    more = {"stream": True, "temperature": 0.5, "user": "ann", "max_tokens": 9, "tool_choice": "none", "seed": 1}
    assert keys(path, {**BODIES[path], **more}) == keys(path, BODIES[path])


@pytest.mark.parametrize("path", BODIES)
def test_models_and_tenants_part_the_keys(path: str) -> None:
    body = BODIES[path]
    found = [
        keys(path, body, model=model, tenant=tenant)
        for model, tenant in itertools.product(("one", "two", "onetwo"), (b"", b"two", b"\0"))
    ]
    assert len({key for one in found for key in one}) == len(found) * len(found[0])
    if "model" in body:
        assert (
            keys(path, body) == keys(path, body, model="tiny") == keys(path, {**body, "model": "other"}, model="tiny")
        )
        assert set(keys(path, body)).isdisjoint(keys(path, {**body, "model": "other"}))


def test_routes_share_no_key() -> None:
    found = [keys(path, {**body, "model": "tiny"}) for path, body in BODIES.items()]
    assert len({key for one in found for key in one}) == sum(map(len, found))


@pytest.mark.parametrize(("path", "name"), [("/v1/messages", "system"), ("/v1/responses", "instructions")])
def test_long_texts_before_the_messages_begin_the_chain(path: str, name: str) -> None:
    one, other = ({**BODIES[path], name: "word " * 2000 + end} for end in ("one", "other"))
    first, second = keys(path, one), keys(path, other)
    assert first[:4] == second[:4]
    assert set(first[4:]).isdisjoint(second[4:])
    assert len(first) == 5 + len(TURNS)


def test_a_next_turn_goes_on() -> None:
    for path, field in (("/v1/chat/completions", "messages"), ("/v1/responses", "input"), ("/v1/messages", "messages")):
        body = BODIES[path]
        first, second = keys(path, body), keys(path, {**body, field: [*TURNS, TURNS[0]]})
        assert second[: len(first)] == first


def test_a_stored_prompt_of_responses_is_in_the_root() -> None:
    body = BODIES["/v1/responses"]
    assert set(keys("/v1/responses", body)).isdisjoint(keys("/v1/responses", {**body, "prompt": {"id": "p"}}))


def test_what_has_no_prompt_of_text_has_no_keys() -> None:
    assert keys("/v1/embeddings", {"model": "tiny", "input": "x"}) == []
    assert keys("/v1/completions", {"model": "tiny", "prompt_embeds": "AAAA"}) == []
    assert keys("/generate", {"input_embeds": [[0.5, 1]]}) == []


def test_the_last_occurrence_of_a_prompt_counts() -> None:
    body = b'{"model":"tiny","prompt":"one","prompt":"two"}'
    assert keys("/v1/completions", body) == keys("/v1/completions", {"model": "tiny", "prompt": "two"})


def test_a_salt_counts_wherever_it_stands() -> None:
    """Some parsers take the first occurrence of a name, others the last."""
    path, found = "/v1/completions", []
    for salts in (b"", b'"cache_salt":"a",', b'"cache_salt":"b",', b'"cache_salt":"a","cache_salt":"b",'):
        found += keys(path, b"{" + salts + b'"model":"tiny","prompt":"x"}')
    found += keys(path, b'{"model":"tiny","prompt":"x","cache_salt":"b","cache_salt":"a"}')
    found += keys(path, b'{"model":"tiny","prompt":"x","cache_salt":"c","cache_salt":null}')
    assert len(set(found)) == 6


def wild_value(random: random.Random, depth: int = 3) -> Any:
    kind = random.randrange(9 if depth else 6)
    if kind < 3:
        letters = random.choice(["ab", "\x00\x7f", "é世\U0001f600", '"\\\n', "\ud83d\ude00", "0123", "{}[],:"])
        return "".join(random.choices(letters, k=random.choice([0, 1, 2, 3, 30, 3000])))
    if kind < 6:
        return random.choice([None, True, False, 0, -1, 10**20, 1.5, -0.0, 1e300, [], {}])
    if kind == 6:
        return [random.randrange(128_000) for _ in range(random.choice([1, 5, 700]))]
    if kind == 7:
        return [wild_value(random, depth - 1) for _ in range(random.randrange(4))]
    return {random.choice(["role", "content", "type", "", "é"]): wild_value(random, depth - 1) for _ in range(3)}


def wild_prompt(random: random.Random) -> tuple[str, dict[str, Any]]:
    path = random.choice(list(BODIES))
    body = dict(BODIES[path])
    [field] = set(body) & {"prompt", "messages", "input", "text"}
    text = wild_value(random, 0)
    if field in ("messages", "input"):
        body[field] = [wild_value(random) for _ in range(random.randint(1, 5))]
    else:
        ids = [random.randrange(1 << 33) for _ in range(600)]
        body[field] = random.choice([text if isinstance(text, str) and text else "x", ids, ["one", "two"], [ids, [1]]])
    if random.random() < 0.3:
        body["tools"] = wild_value(random)
    return path, body


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_wild_prompts_are_never_shared_across_owners(count: int) -> None:
    """An owner: model, adapter, salt and tenant."""
    chance = random.Random(count)
    owners: dict[int, tuple[object, ...]] = {}
    for _ in range(count):
        path, body = wild_prompt(chance)
        for _ in range(3):
            model, tenant = chance.choice(["tiny", "tin", "y"]), chance.choice([b"", b"ann", b"bob"])
            adapter, salt = (chance.choice([None, "", "y", "ann", ["y"], 1]) for _ in range(2))
            marked = {**body, chance.choice(ADAPTERS[:2]): adapter, chance.choice(SALTS): salt}
            owner = (model, tenant, json.dumps(adapter), json.dumps(salt))
            text = json.dumps(marked, ensure_ascii=chance.random() < 0.5, indent=chance.choice([None, 1]))
            for key in keys(path, text.encode("utf-8", "replace"), model=model, tenant=tenant):
                assert owners.setdefault(key, owner) == owner
    assert len(owners) > count


def test_a_body_of_16_mib_is_hashed_in_bounded_time() -> None:
    text = "x" * (4 << 20)
    request = inbound(
        "/v1/messages", {**BODIES["/v1/messages"], "system": text, "tools": [text], "messages": [text] * 2}
    )
    started = time.monotonic()
    found = KEYS.keys_of(request)
    assert time.monotonic() - started < 10
    assert len(found.keys) == KEYS_MAX
