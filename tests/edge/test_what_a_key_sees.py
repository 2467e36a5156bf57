"""A key for some models, no key and a wrong one, at every route: no other model is named, no worker and no address."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from kvxfer.policy.keylimits import KeyLimits
from kvxfer.router.apis import ROUTES
from kvxfer.router.auth import ApiKeys
from kvxfer.router.keyfile import KeyEntry, digest_of
from kvxfer.router.ui.routes import FILES
from kvxfer.types import Role
from tests.support.fake_workers import FakeWorker, Running, free_port, router_over

SECRET = "the-secret-model"
OPEN = "tiny"
KEYS = {"some": "sk-some", "all": "sk-all"}
RULES = (f"/v1/other/={SECRET}", "/v1/audio/=engine", f"/v1/mine/={OPEN}")


def keys() -> ApiKeys:
    made = ApiKeys()
    made.replace(
        [
            KeyEntry("team", (digest_of(b"sk-some"),), KeyLimits(), frozenset({OPEN})),
            KeyEntry("all", (digest_of(b"sk-all"),), KeyLimits(), None),
        ]
    )
    return made


def fleet() -> tuple[FakeWorker, ...]:
    """One model in two parts and one in one, which the key is for, and one that it is not for."""
    return (
        FakeWorker("agent-one", Role.PREFILL, model=OPEN),
        FakeWorker("agent-two", Role.DECODE, model=OPEN),
        FakeWorker("agent-three", Role.BOTH, model=SECRET, dialect="plain"),
    )


def told(fakes: tuple[FakeWorker, ...]) -> list[str]:
    """What no answer may have."""
    return [SECRET, "agent-", *(f":{fake.port}" for fake in fakes), *(f"={fake.port}" for fake in fakes)]


BODIES: tuple[dict[str, Any], ...] = tuple(
    {**named, **asked}
    for named in ({}, {"model": OPEN}, {"model": SECRET}, {"model": "unheard-of"}, {"model": OPEN, "lora_path": SECRET})
    for asked in (
        {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x", "text": "x", "max_tokens": 1},
        {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x", "text": "x", "max_tokens": 1}
        | {"stream": True, "stream_options": {"include_usage": True}},
    )
)


async def targets(router: Running) -> list[tuple[str, str]]:
    """Every method and path of the application, those that pass through, and some that do not exist."""
    document = (await router.client.get("/openapi.json")).json()
    known = [
        (method.upper(), path.replace("{agent_id}", "agent-three").replace("{model}", name))
        for path, methods in document["paths"].items()
        for method in methods
        for name in (OPEN, "unheard-of")
    ]
    assert {"/v1/workers", "/v1/models", "/metrics", "/ready", "/workers", "/ui/state"} <= {path for _, path in known}
    more = ["/docs", "/openapi.json", "/ready?model=" + OPEN, "/held", "/statistics", "/absent", "/v1/workers/"]
    more += [*FILES, "/v1/other/x", "/v1/audio/x", "/v1/mine/x", "/v1/audio/../x"]
    known += [(method, path) for path in more for method in ("GET", "HEAD", "POST", "OPTIONS", "DELETE")]
    return known


def shown(answer: httpx.Response) -> str:
    return f"{answer.headers!r}\n{answer.text}"


@pytest.mark.parametrize("key", ["sk-some", "", "sk-wrong"])
@pytest.mark.parametrize("has_admin_key", [False, True])
async def test_no_route_tells_what_the_key_may_not_use(key: str, has_admin_key: bool, tmp_path: Any) -> None:
    fakes = fleet()
    admin = tmp_path / "admin"
    admin.write_text("admin-secret\n")
    options: dict[str, Any] = {"host": "127.0.0.1", "admin_key_file": str(admin)} if has_admin_key else {}
    async with router_over(*fakes, keys=keys(), pass_through=RULES, **options) as router:
        words = told(fakes)
        headers = {"x-kvxfer-account": "1", **({"authorization": f"Bearer {key}"} if key else {})}
        headers |= (
            {} if has_admin_key else {"host": "router.example"}
        )  # a caller from elsewhere: the admin routes are closed
        for method, path in await targets(router):
            if "agent-three" in path:
                continue  # asked below: the answer may repeat the question
            answer = await router.client.request(method, path, headers=headers)
            assert not [word for word in words if word in shown(answer)], (method, path, shown(answer))
        for api in ROUTES:
            for body in BODIES:
                answer = await router.client.post(api.path, json=body, headers=headers)
                found = [word for word in words if word in shown(answer)]
                is_repeated = SECRET in json.dumps(body)
                assert not found or (is_repeated and found == [SECRET]), (api.path, body, shown(answer))
                if is_repeated:
                    assert answer.status_code in (401, 403), (api.path, body, shown(answer))


@pytest.mark.parametrize("failing", ["unreachable", "refusing", "without models"])
async def test_no_failure_names_a_worker(failing: str) -> None:
    fakes = fleet()
    headers = {"authorization": f"Bearer {KEYS['some']}", "x-kvxfer-account": "1"}
    async with router_over(*fakes, keys=keys(), pass_through=RULES, connect_timeout_s=1.0) as router:
        words = told(fakes)
        for fake in fakes:
            if failing == "unreachable":
                fake.port = free_port()
            elif failing == "refusing":
                fake.always_fails = 503, {"detail": "no room"}
            else:
                fake.model = ""
        router.publish(*fakes)
        words += told(fakes)
        for path in ("/v1/completions", "/tokenize", "/v1/mine/x", "/generate"):
            for stream in (False, True):
                answer = await router.client.post(path, json={**BODIES[0], "stream": stream}, headers=headers)
                assert answer.status_code >= 400
                assert not [word for word in words if word and word in shown(answer)], (path, shown(answer))


async def same_but_for_the_name(router: Running, method: str, path: str, headers: dict[str, str]) -> None:
    answers = []
    for name in (SECRET, "unheard-of"):
        answer = await router.client.request(method, path + name, headers=headers)
        body = {**answer.json(), "workers_ready": 0}
        answers.append((answer.status_code, json.dumps(body).replace(name, "NAME")))
    assert answers[0] == answers[1], path


@pytest.mark.parametrize("key", ["sk-some", "", "sk-wrong"])
async def test_a_model_that_the_key_is_not_for_is_answered_as_one_that_is_not_there(key: str) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with router_over(*fleet(), keys=keys()) as router:
        for method, path in (("GET", "/v1/models/"), ("GET", "/ready?model=")):
            await same_but_for_the_name(router, method, path, headers)
        bodies = []
        for name in (SECRET, "unheard-of"):
            answer = await router.complete(model=name, headers=headers)
            bodies.append((answer.status_code, answer.text.replace(name, "NAME")))
        assert bodies[0] == bodies[1]


async def test_what_a_key_may_use_it_sees() -> None:
    fakes = fleet()
    some, everything = ({"authorization": f"Bearer {KEYS[name]}"} for name in ("some", "all"))
    async with router_over(*fakes, keys=keys(), metrics_port=0, probe_port=0) as router:
        [p, d] = (await router.client.get("/v1/workers", headers=some)).json()["data"]
        assert {p["role"], d["role"]} == {"prefill", "decode"}
        assert set(p) == {"model", "aliases", "role", "max_context_tokens", "is_ready", "state"}
        assert (p["model"], p["is_ready"], p["state"]) == (OPEN, True, "in")
        assert len((await router.client.get("/v1/workers", headers=everything)).json()["data"]) == 3
        assert (await router.client.get(f"/ready?model={OPEN}", headers=some)).status_code == 200
        assert (await router.client.get("/ready")).status_code == 200
        assert (await router.client.get("/metrics", headers=everything)).status_code == 200
        assert (await router.client.get("/metrics", headers=some)).status_code == 403
        assert (await router.client.get("/metrics")).status_code == 401
        # These ports are for the operator's own.
        answer = await router.client.get(router.ready["metrics_url"] + "/metrics")
        assert "agent-three" in answer.text
        assert (await router.client.get(router.ready["probe_url"] + f"/ready?model={SECRET}")).status_code == 200
        answer = await router.complete(headers={**some, "x-kvxfer-account": "1"})
        account = json.loads(answer.headers["x-kvxfer-account"])
        assert (account["prefill_agent"], account["decode_agent"]) == ("prefill", "decode")
        said = answer.json()["kvxfer"]
        assert (said["prefill_agent"], said["decode_agent"]) == ("prefill", "decode")
        answer = await router.complete(headers=everything)
        assert answer.json()["kvxfer"]["decode_agent"] == "agent-two"


async def test_a_request_without_a_model_goes_to_the_only_one_that_its_key_is_for() -> None:
    headers = {"authorization": f"Bearer {KEYS['some']}"}
    async with router_over(*fleet(), keys=keys()) as router:
        answer = await router.client.post("/tokenize", json={"prompt": "x"}, headers=headers)
        assert answer.status_code == 200
        router.publish(router.fakes[2])
        answer = await router.client.post("/tokenize", json={"prompt": "x"}, headers=headers)
        assert (answer.status_code, SECRET in answer.text) == (400, False)
        router.publish()
        answer = await router.client.post("/tokenize", json={"prompt": "x"}, headers=headers)
        assert answer.status_code == 503


async def test_keys_for_all_models_close_nothing() -> None:
    async with router_over(*fleet(), keys=ApiKeys(("sk-all",))) as router:
        assert (await router.client.get("/metrics")).status_code == 200
        assert (await router.client.get(f"/ready?model={SECRET}")).status_code == 200


async def test_an_admin_reads_metrics(tmp_path: Any) -> None:
    admin = tmp_path / "admin"
    admin.write_text("admin-secret\n")
    async with router_over(*fleet(), keys=keys(), admin_key_file=str(admin)) as router:
        for key, status in (("admin-secret", 200), ("sk-all", 200), ("sk-some", 403), ("wrong", 401)):
            answer = await router.client.get("/metrics", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status, key
