"""API keys: the forms of their file, what of it is told, and the limits of each holder at a running router."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import pathlib
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ConfigError
from kvxfer.openai.errors import RequestError
from kvxfer.policy.keylimits import KeyLimits
from kvxfer.router.apis import api_of
from kvxfer.router.auth import ApiKeys
from kvxfer.router.inbound import Inbound
from kvxfer.router.keyed import EXPECTED_MAX, RateLimitedError, expected_tokens
from kvxfer.router.keyfile import UNNAMED, KeyEntry, digest_of, read_key_file
from kvxfer.router.server import followed_keys
from kvxfer.router.usage import UsageSeen
from kvxfer.types import Role
from tests.support.fake_workers import FakeWorker, Running, events, eventually, failing, router_over
from tests.support.serving.servers import logged

SECRET = "sk-this-is-a-secret"
OTHER = "sk-this-is-another"


def bearer(key: str = SECRET) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def holder(name: str = "team", key: str = SECRET, models: list[str] | None = None, **limits: Any) -> KeyEntry:
    allowed = None if models is None else frozenset(models)
    return KeyEntry(name, (digest_of(key.encode()),), KeyLimits(**limits), allowed)


def keys_of(*entries: KeyEntry) -> ApiKeys:
    keys = ApiKeys()
    keys.replace(entries)
    return keys


def pair() -> tuple[FakeWorker, FakeWorker]:
    return FakeWorker("p0", Role.PREFILL), FakeWorker("d0", Role.DECODE)


def written(tmp_path: pathlib.Path, text: str) -> str:
    path = tmp_path / "keys"
    path.write_text(text)
    return str(path)


# The file.


def test_a_file_of_lines_names_keys_without_limits(tmp_path: pathlib.Path) -> None:
    entries = read_key_file(written(tmp_path, f"# ours\n{SECRET}\n\n  {OTHER} \n"))
    assert [entry.digests for entry in entries] == [(digest_of(SECRET.encode()),), (digest_of(OTHER.encode()),)]
    assert all(entry.name == UNNAMED and entry.limits == KeyLimits() for entry in entries)


YAML = f"""
# holders
defaults:
  requests_per_minute: 60
  models: [tiny]
keys:
  - name: team-a
    key: {SECRET}
    tokens_per_minute: 1000
    max_inflight: 3
  - name: team-b
    sha256: {hashlib.sha256(OTHER.encode()).hexdigest()}
    key: [one-of-two-keys, two-of-two-keys]
    requests_per_minute: 0
    models: [tiny, large]
"""


@pytest.mark.parametrize("form", ["yaml", "marked", "json", "indented"])
def test_a_file_with_limits(tmp_path: pathlib.Path, form: str) -> None:
    import yaml

    values = yaml.safe_load(YAML)
    text = {
        "yaml": YAML,
        "marked": "---\n" + YAML,
        "json": json.dumps(values),
        "indented": json.dumps(values, indent=2),
    }[form]
    first, second = read_key_file(written(tmp_path, text))
    assert first.name == "team-a"
    assert first.limits == KeyLimits(requests_per_minute=60, tokens_per_minute=1000, max_inflight=3)
    assert first.models == {"tiny"}
    assert second.limits == KeyLimits()
    assert second.models == {"tiny", "large"}
    keys = keys_of(first, second)
    for key in (OTHER, "one-of-two-keys", "two-of-two-keys"):
        found = keys.check(f"Bearer {key}")
        assert found is not None
        assert found.name == "team-b"
    for wrong in ("three-of-two-keys", hashlib.sha256(OTHER.encode()).hexdigest(), ""):
        with pytest.raises(RequestError):
            keys.check(f"Bearer {wrong}")


def entry(**more: Any) -> str:
    return json.dumps({"keys": [{"name": "team", "key": SECRET, **more}]})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("keys:", "keys must be a list"),
        ("keys: []", "holds no API key"),
        ("keys: [", "no YAML in line"),
        ('{"keys": [', "no JSON in line"),
        ('{"keys": [], "keys": []}', "no JSON"),
        (f"keys: [{SECRET}]", "key 1 must be a mapping"),
        (f"keys:\n- {SECRET}: 1", "unknown member"),
        (f"keys: []\n{SECRET}: 1", "the file has an unknown member"),
        (json.dumps({"keys": [{"key": SECRET}]}), "needs a name"),
        (entry(name=SECRET + " "), "needs a name"),
        (entry(key=None), "needs a key or the sha256"),
        (entry(key=5), "must be text"),
        (entry(key=f" {SECRET}"), "a key has 1 to"),
        (entry(key="x" * 1025), "a key has 1 to"),
        (entry(sha256=SECRET), "sha256 must be 64"),
        (entry(requests_per_minute=-1), "requests_per_minute must be 0 to"),
        (entry(requests_per_minute=SECRET), "requests_per_minute must be a number"),
        (entry(max_inflight=1.5), "max_inflight must be a number"),
        (entry(max_inflight=True), "max_inflight must be a number"),
        (entry(models=[1]), "models must be text"),
        (json.dumps({"keys": [{"name": "a", "key": SECRET}, {"name": "a", "key": OTHER}]}), "a name that another"),
        (json.dumps({"keys": [{"name": "a", "key": SECRET}, {"name": "b", "key": SECRET}]}), "a key that another"),
        (json.dumps({"keys": [{"name": "a", "key": [f"key-{n}" for n in range(1025)]}]}), "text, or a list"),
        (json.dumps({"defaults": {"name": "a"}, "keys": []}), "defaults has an unknown member"),
        (entry(key="\ud800"), "half a character"),
        *((f"keys:\n- name: a\n  key: !!{tag}", "no YAML") for tag in ("int ''", "float ''", "bool x", "timestamp x")),
        *(
            (f"{head}\n- name: a", "no blank within")
            for head in ("", "[]", '"keys":', "keys :", "--- # x", "%YAML 1.2")
        ),
        ("keys:\n- &a {name: a}\n- {<<: *a, key: b}", "no YAML in line 3"),
    ],
)
def test_a_wrong_file_is_told_without_a_key(tmp_path: pathlib.Path, text: str, reason: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=reason) as caught:
        read_key_file(path)
    assert path in str(caught.value)
    assert SECRET not in str(caught.value)
    assert OTHER not in str(caught.value)


@given(st.text(max_size=200) | st.text(max_size=200).map(lambda text: "keys:\n" + text))
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any-keys"
    path.write_text(text, errors="replace")
    with contextlib.suppress(ConfigError):
        assert read_key_file(str(path))


def test_representations_show_no_key() -> None:
    keys = keys_of(holder())
    found = keys.check(f"Bearer {SECRET}")
    for one in (keys, found, holder(), ApiKeys((SECRET,))):
        assert SECRET not in repr(one)
        assert hashlib.sha256(SECRET.encode()).hexdigest() not in repr(one)
        assert repr(digest_of(SECRET.encode())) not in repr(one)


def test_admin_keys_have_no_limits(tmp_path: pathlib.Path) -> None:
    ApiKeys.from_file(written(tmp_path, json.dumps({"keys": [{"name": "a", "key": SECRET}]})), with_limits=False)
    for limited in ({"max_inflight": 1}, {"models": ["tiny"]}):
        with pytest.raises(ConfigError, match="neither limits nor models"):
            ApiKeys.from_file(written(tmp_path, entry(**limited)), with_limits=False)


async def test_a_changed_file_is_read_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.router.server.KEYS_POLL_S", 0.02)
    path = tmp_path / "keys"
    path.write_text(SECRET)
    path.chmod(0o600)
    with logged(logging.INFO) as records:
        async with followed_keys(keys := ApiKeys(), str(path), "API keys"):
            assert keys.check(f"Bearer {SECRET}") is not None
            path.write_text(entry(key=OTHER, max_inflight=1))

            def is_new() -> bool:
                try:
                    return keys.check(f"Bearer {OTHER}") is not None
                except RequestError:
                    return False

            await eventually(is_new)
            with pytest.raises(RequestError):
                keys.check(f"Bearer {SECRET}")
            path.write_text(f"keys:\n- {SECRET}")
            await eventually(lambda: any(record.levelno == logging.WARNING for record in records))
            await asyncio.sleep(0.1)
            assert is_new()
            path.unlink()
            await eventually(lambda: sum(record.levelno == logging.WARNING for record in records) == 2)
            assert is_new()
    text = "\n".join(record.getMessage() + str(vars(record)) for record in records)
    assert SECRET not in text
    assert OTHER not in text
    with pytest.raises(ConfigError):
        async with followed_keys(keys, str(path), "API keys"):
            pass


def test_a_holder_goes_on_with_what_it_used_under_a_new_key() -> None:
    keys = keys_of(holder(requests_per_minute=2))
    keys.enter(f"Bearer {SECRET}").end()
    running = keys.enter(f"Bearer {SECRET}")
    keys.replace([holder(key=OTHER, requests_per_minute=2, max_inflight=1)])
    with pytest.raises(RateLimitedError, match="max_inflight 1"):
        keys.enter(f"Bearer {OTHER}")
    running.end()
    running.end()
    with pytest.raises(RateLimitedError, match="requests_per_minute 2") as caught:
        keys.enter(f"Bearer {OTHER}")
    assert caught.value.retry_after_s == 30
    assert caught.value.key_name == "team"


# What an answer says of its tokens.


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b'{"usage": {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}}', (4, 3)),
        (b'{"usage": {"prompt_tokens": 4, "total_tokens": 4}}', (4, None)),
        (b'{"type": "response.completed", "response": {"usage": {"input_tokens": 5, "output_tokens": 6}}}', (5, 6)),
        (b'{"type": "message_start", "message": {"usage": {"input_tokens": 5, "output_tokens": 1}}}', (5, None)),
        (b'{"type": "message_delta", "usage": {"output_tokens": 9}}', (None, 9)),
        (b'{"text": "x", "meta_info": {"prompt_tokens": 2, "completion_tokens": 1}}', (2, 1)),
        (b'{"usage": {"prompt_tokens": true, "completion_tokens": -1}}', (None, None)),
        (b'{"usage": [{"prompt_tokens": 1}]}', (None, None)),
        (b'["prompt_tokens"]', (None, None)),
        (b'{"usage": {"prompt_tokens": 1%b, "completion_tokens": 3}}' % (b"0" * 400), (None, 3)),
        (b'[{"meta_info": {"prompt_tokens": 2, "completion_tokens": 1}}, {"meta_info": {"prompt_tokens": 3}}]', (5, 1)),
        (b'{"prompt_tokens"', (None, None)),
        (b"[DONE]", (None, None)),
    ],
)
def test_usage_is_found_where_an_api_puts_it(content: bytes, found: tuple[int | None, int | None]) -> None:
    seen = UsageSeen()
    seen.note(content)
    seen.note(content)
    assert (seen.prompt, seen.answer) == found


def test_each_sequence_of_a_stream_of_several_counts() -> None:
    seen = UsageSeen()
    for index, tokens in ((0, 1), (1, 1), (0, 2), (1, 5), (None, 1)):
        seen.note(json.dumps({"index": index, "meta_info": {"prompt_tokens": 4, "completion_tokens": tokens}}).encode())
    assert (seen.prompt, seen.answer) == (8, 7)


@pytest.mark.parametrize(
    ("path", "more", "bound"),
    [
        ("/v1/completions", {"n": 3}, 30),
        ("/v1/completions", {"n": 3.0, "best_of": 2}, 30),
        ("/v1/completions", {"n": "3"}, None),
        ("/v1/completions", {"n": 2, "use_beam_search": True}, 20),
        ("/v1/completions", {"n": 10**19, "max_tokens": 2**31 - 1}, EXPECTED_MAX),
        ("/v1/chat/completions", {"n": 1e400}, None),
        ("/generate", {"sampling_params": {"max_new_tokens": 10}}, 10),
        ("/generate", {"sampling_params": {"max_new_tokens": 10, "n": 3}}, None),
    ],
)
def test_several_answers_cost_more_than_one(path: str, more: dict[str, Any], bound: int | None) -> None:
    api = api_of(path)
    assert api is not None
    prompt = {"messages": [{"role": "user", "content": "hello"}], "prompt": "hello", "text": "hello"}
    text = json.dumps({"model": "m", "max_tokens": 10, **prompt, **more}).replace("Infinity", "1e400")
    assert expected_tokens(Inbound.read(api, text.encode()))[1] == bound


# At a running router.


def limited(answer: httpx.Response, kind: str) -> dict[str, Any]:
    assert answer.status_code == 429, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    error = answer.json()["error"]
    assert (error["code"], error["type"], error["retryable"]) == ("rate_limit_exceeded", kind, True)
    return dict(error)


async def tokens(router: Running, name: str = "team") -> float:
    return await router.metric(f'kvxfer_router_key_tokens_total{{key="{name}"}}')


async def test_requests_a_minute() -> None:
    p, d = pair()
    keys = keys_of(holder(requests_per_minute=2), holder("other", OTHER))
    async with router_over(p, d, keys=keys) as router:
        for _ in range(2):
            assert (await router.complete(headers=bearer())).status_code == 200
        refused = await router.complete(headers=bearer())
        assert "requests_per_minute 2" in limited(refused, "requests")["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-request-id"]
        limited(await router.client.get("/v1/models", headers=bearer()), "requests")
        for _ in range(5):
            assert (await router.complete(headers=bearer(OTHER))).status_code == 200
        assert (await router.complete(headers=bearer("wrong"))).status_code == 401
        assert len(d.received) == 7
        assert await router.metric('kvxfer_router_key_refused_total{key="team",limit="requests"}') == 2
        await router.wait_metric('kvxfer_router_key_requests_total{key="team",outcome="ok"}', 2)
        await router.wait_metric('kvxfer_router_key_requests_total{key="other",outcome="ok"}', 5)
        page = (await router.client.get("/metrics")).text
        assert SECRET not in page
        assert hashlib.sha256(SECRET.encode()).hexdigest() not in page


async def test_control_routes_count_as_requests() -> None:
    p, d = pair()
    async with router_over(p, d, keys=keys_of(holder(requests_per_minute=3, max_inflight=1))) as router:
        for path in ("/v1/models", "/v1/models/tiny", "/v1/workers"):
            assert (await router.client.get(path, headers=bearer())).status_code == 200
        limited(await router.complete(headers=bearer()), "requests")
        for path in ("/live", "/ready", "/metrics"):
            assert (await router.client.get(path)).status_code == 200


async def test_errors_have_the_shape_of_the_clients_api() -> None:
    p, d = pair()
    async with router_over(p, d, keys=keys_of(holder(requests_per_minute=1))) as router:
        await router.complete(headers=bearer())
        body = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
        refused = await router.client.post("/v1/messages", json=body, headers=bearer())
        assert refused.status_code == 429
        assert refused.json()["type"] == "error"
        assert refused.json()["error"]["type"] == "rate_limit_error"


async def test_requests_at_once() -> None:
    p, d = pair()
    d.hold = asyncio.Event()
    async with router_over(p, d, keys=keys_of(holder(max_inflight=2))) as router:
        tasks = [asyncio.create_task(router.complete(headers=bearer())) for _ in range(2)]
        await eventually(lambda: len(d.received) == 2)
        assert await router.metric('kvxfer_router_key_inflight{key="team"}') == 2
        limited(await router.complete(headers=bearer()), "requests")
        d.hold.set()
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200, 200]
        await router.wait_metric('kvxfer_router_key_inflight{key="team"}', 0)
        assert (await router.complete(headers=bearer())).status_code == 200


@pytest.mark.parametrize("end", ["client leaves", "worker fails", "no json", "no model", "broken stream"])
async def test_a_request_is_released_however_it_ends(end: str) -> None:
    p, d = pair()
    keys = keys_of(holder(max_inflight=1))
    async with router_over(p, d, keys=keys, attempts_max=1) as router:
        for _ in range(3):
            if end == "client leaves":
                d.hold = asyncio.Event()
                task = asyncio.create_task(router.complete(headers=bearer()))
                begun = len(d.received)
                await eventually(lambda begun=begun: len(d.received) > begun)  # type: ignore[misc]
                task.cancel()
                await asyncio.wait({task})
                d.hold.set()
                d.hold = None
            elif end == "worker fails":
                d.failures = [failing(500, "internal", retryable=False)]
                p.failures = []
                assert (await router.complete(headers=bearer())).status_code >= 500
            elif end == "no json":
                answer = await router.client.post("/v1/completions", content=b"{", headers=bearer())
                assert answer.status_code == 400
            elif end == "no model":
                answer = await router.client.post(
                    "/v1/completions", json={"model": "x", "prompt": "x"}, headers=bearer()
                )
                assert answer.status_code == 404
            else:
                d.cut_after = 2
                assert '"peer_gone"' in (await router.complete(stream=True, headers=bearer())).text
                d.cut_after = None
            await router.wait_metric('kvxfer_router_key_inflight{key="team"}', 0)
        assert keys.check(f"Bearer {SECRET}").inflight == 0  # type: ignore[union-attr]


async def test_a_count_that_no_answer_has_leaks_nothing() -> None:
    p, d = pair()
    d.prompt_tokens = 10**400
    keys = keys_of(holder(max_inflight=1, tokens_per_minute=1000))
    async with router_over(p, d, keys=keys) as router:
        for _ in range(2):
            assert (await router.complete(max_tokens=20, headers=bearer())).status_code == 200
        await router.wait_metric('kvxfer_router_key_inflight{key="team"}', 0)
        await router.wait_metric('kvxfer_router_key_tokens_total{key="team"}', 12)  # 3 by estimate, and 3 of the answer


async def test_tokens_are_the_answers_own_where_it_says_them() -> None:
    p, d = pair()
    async with router_over(p, d, keys=keys_of(holder(tokens_per_minute=1000))) as router:
        assert (await router.complete(max_tokens=900, headers=bearer())).status_code == 200
        await router.wait_metric('kvxfer_router_key_tokens_total{key="team"}', 7)
        answer = await router.complete(
            max_tokens=900, stream=True, stream_options={"include_usage": True}, headers=bearer()
        )
        assert events(answer.text)[-1] == "[DONE]"
        await router.wait_metric('kvxfer_router_key_tokens_total{key="team"}', 14)
        assert await router.metric('kvxfer_router_key_refused_total{key="team",limit="tokens"}') == 0


async def test_tokens_are_the_bound_where_an_answer_says_nothing() -> None:
    p, d = pair()
    async with router_over(p, d, keys=keys_of(holder(tokens_per_minute=1000))) as router:
        assert (await router.complete(max_tokens=600, stream=True, headers=bearer())).status_code == 200
        await router.wait_metric('kvxfer_router_key_tokens_total{key="team"}', 603)  # "hello there" is 3 by estimate
        error = limited(await router.complete(max_tokens=600, stream=True, headers=bearer()), "tokens")
        assert "tokens_per_minute 1000" in error["message"]
        assert (await router.complete(max_tokens=300, stream=True, headers=bearer())).status_code == 200


async def test_tokens_of_an_answer_without_a_bound_are_estimated() -> None:
    p, d = pair()
    d.tokens = ["word "] * 100
    async with router_over(p, d, keys=keys_of(holder(tokens_per_minute=1000))) as router:
        assert (await router.complete(stream=True, headers=bearer())).status_code == 200
        await eventually(lambda: is_estimated(router))


async def is_estimated(router: Running) -> bool:
    return 30 <= await tokens(router) <= 150


async def test_a_request_that_fails_costs_no_tokens() -> None:
    p, d = pair()
    p.always_fails = d.always_fails = failing(400, "invalid_argument", retryable=False, kind="invalid_request_error")
    async with router_over(p, d, keys=keys_of(holder(tokens_per_minute=1000))) as router:
        for _ in range(5):
            assert (await router.complete(max_tokens=900, headers=bearer())).status_code == 400
        await router.wait_metric('kvxfer_router_key_requests_total{key="team",outcome="client_error"}', 5)
        assert await tokens(router) == 0


async def test_models_of_a_key() -> None:
    tiny = FakeWorker("d0", Role.BOTH)
    large = FakeWorker("d1", Role.BOTH, model="large")
    keys = keys_of(holder(models=["tiny", "absent"]), holder("all", OTHER))
    async with router_over(tiny, large, keys=keys) as router:

        async def listed(key: str) -> list[str]:
            found = (await router.client.get("/v1/models", headers=bearer(key))).json()
            return sorted(model["id"] for model in found["data"])

        assert await listed(SECRET) == ["tiny"]
        assert await listed(OTHER) == ["large", "tiny"]
        assert (await router.client.get("/v1/models/large", headers=bearer())).status_code == 404
        assert (await router.complete(headers=bearer())).status_code == 200
        refused = await router.complete(model="large", headers=bearer())
        assert refused.status_code == 403
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("model_not_allowed", "model")
        unknown = await router.complete(model="nothing", headers=bearer())
        assert unknown.json()["error"]["code"] == "model_not_allowed"  # it does not tell which models there are
        assert (await router.complete(model="absent", headers=bearer())).json()["error"]["code"] == "model_not_found"
        assert (await router.complete(model="large", headers=bearer(OTHER))).status_code == 200


async def test_a_request_without_a_model_is_held_to_the_keys_models() -> None:
    large = FakeWorker("d1", Role.BOTH, model="large")
    async with router_over(large, keys=keys_of(holder(models=["tiny"]), holder("all", OTHER))) as router:
        answers = [
            await router.client.post("/tokenize", json={"prompt": "x"}, headers=bearer(key)) for key in (SECRET, OTHER)
        ]
        assert [(answer.status_code, "large" in answer.text) for answer in answers] == [(400, False), (200, True)]


async def test_the_log_names_the_holder_and_no_key() -> None:
    p, d = pair()
    with logged(logging.DEBUG) as records:
        async with router_over(p, d, keys=keys_of(holder(requests_per_minute=1))) as router:
            await router.complete(headers=bearer())
            await router.complete(headers=bearer())
    lines = [record for record in records if record.name == "kvxfer.router.request"]
    assert [vars(record)["key"] for record in lines] == ["team", "team"]
    assert [vars(record).get("code") for record in lines] == [None, "rate_limit_exceeded"]
    ours = [record for record in records if record.name.startswith("kvxfer")]
    assert not any(SECRET in f"{record.getMessage()}{vars(record)}" for record in ours)
