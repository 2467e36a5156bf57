"""What the router says of a model, of what its workers say of it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvxfer.policy.health import HealthOptions, WorkerHealth
from kvxfer.policy.keylimits import KeyLimits
from kvxfer.router.auth import ApiKeys
from kvxfer.router.fleet.entry import WorkerEntry
from kvxfer.router.fleet.facts import LISTED_BYTES_MAX, read_models
from kvxfer.router.fleet.listed_models import listed_of
from kvxfer.router.keyfile import KeyEntry, digest_of
from kvxfer.types import Role
from tests.support.fake_workers import FakeWorker, router_over
from tests.support.fleet import stock

VLLM = {
    "id": "m",
    "object": "model",
    "created": 1,
    "owned_by": "vllm",
    "root": "/models/m",
    "parent": None,
    "max_model_len": 4096,
    "permission": [{"id": "modelperm-1"}],
}


def entry(*entries_said: dict[str, Any], name: str = "d0", context_tokens: int = 0) -> WorkerEntry:
    worker = stock(name, model="")
    info = dataclasses.replace(worker.member.info, max_context_tokens=context_tokens)
    made = WorkerEntry(
        dataclasses.replace(worker, member=dataclasses.replace(worker.member, info=info)), WorkerHealth(HealthOptions())
    )
    made.identity = read_models(json.dumps({"object": "list", "data": list(entries_said)}).encode())
    made.refresh()
    return made


def test_what_an_engine_says_of_a_model_passes_on() -> None:
    more = {"max_loras": 4, "is_moe": True, "scale": 1.5}
    adapter = {"id": "a", "object": "model", "root": "/adapters/a", "parent": "m"}
    one = entry({**VLLM, **more}, adapter)
    assert listed_of("m", [one]) == {"root": "/models/m", "parent": None, "max_model_len": 4096, **more}
    assert listed_of("a", [one]) == {"root": "/adapters/a", "parent": "m", "max_model_len": 4096}
    assert listed_of("other", [one]) == {}


def test_the_smallest_context_of_the_workers_counts() -> None:
    """A prompt that fits it fits wherever it is sent."""
    workers = [entry({**VLLM, "max_model_len": tokens}, name=f"d{tokens}") for tokens in (8192, 2048, 4096)]
    assert listed_of("m", workers)["max_model_len"] == 2048
    assert listed_of("m", [*workers, entry({**VLLM, "max_model_len": None}, name="x")])["max_model_len"] == 2048
    assert listed_of("m", [*workers, entry(VLLM, name="x", context_tokens=1024)])["max_model_len"] == 1024


def test_what_workers_contradict_each_other_in_is_left_out() -> None:
    said = [entry({**VLLM, "root": root}, name=f"d{at}") for at, root in enumerate(["/a", "/a", "/b", "/a"])]
    assert listed_of("m", said[:2])["root"] == "/a"
    assert "root" not in listed_of("m", said)
    assert listed_of("m", said)["parent"] is None


def test_an_entry_of_too_much_keeps_its_context() -> None:
    for more in ({"x": "y" * LISTED_BYTES_MAX}, {str(number): number for number in range(99)}):
        assert listed_of("m", [entry({**VLLM, **more})]) == {"max_model_len": 4096}


async def test_both_routes_of_models_say_what_the_workers_say() -> None:
    fakes = [FakeWorker("d0"), FakeWorker("d1")]
    async with router_over(*fakes) as router:
        for tokens, found in zip((4096, 1024), router.workers.entries(), strict=True):
            said = {**VLLM, "id": fakes[0].model, "max_model_len": tokens}
            router.workers.learn(found, identity=read_models(json.dumps({"data": [said]}).encode()))
        [listed] = (await router.client.get("/v1/models")).json()["data"]
        assert listed == (await router.client.get(f"/v1/models/{fakes[0].model}")).json()
        assert {name: listed[name] for name in ("id", "object", "owned_by", "root", "parent", "max_model_len")} == {
            "id": fakes[0].model,
            "object": "model",
            "owned_by": "kvxfer",
            "root": "/models/m",
            "parent": None,
            "max_model_len": 1024,
        }


async def test_a_key_sees_no_model_by_the_name_of_its_adapter() -> None:
    worker, keys = FakeWorker("d0", Role.BOTH), ApiKeys()
    keys.replace([KeyEntry("limited", (digest_of(b"secret"),), KeyLimits(), frozenset({"adapter"}))])
    async with router_over(worker, keys=keys) as router:
        [found] = router.workers.entries()
        said = [{**VLLM, "id": worker.model}, {"id": "adapter", "root": "/a", "parent": worker.model}]
        router.workers.learn(found, identity=read_models(json.dumps({"data": said}).encode()))
        shown = {"authorization": "Bearer secret"}
        [listed] = (await router.client.get("/v1/models", headers=shown)).json()["data"]
        assert (listed["id"], listed["root"]) == ("adapter", "/a")
        assert "parent" not in listed
        assert worker.model not in (await router.client.get("/v1/models/adapter", headers=shown)).text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["max_model_len", "root", "parent", "object", "created", "owned_by"]) | st.text(max_size=3)


@given(st.lists(st.dictionaries(NAMES, JSON, max_size=5), min_size=1, max_size=3))
def test_what_any_engine_says_is_plain_values(entries_said: list[dict[str, Any]]) -> None:
    made = [entry({**found, "id": "m"}, name=f"d{at}") for at, found in enumerate(entries_said)]
    found = listed_of("m", made)
    json.dumps(found, allow_nan=False)
    assert not {"id", "object", "created", "owned_by"} & found.keys()
    assert all(value is None or isinstance(value, (bool, int, float, str)) for value in found.values())
