"""Where a key may stand, and bodies that are compressed, at the router and at a worker."""

from __future__ import annotations

import gzip
import json
import pathlib

import httpx
import pytest

from kvxfer.router.apis import ROUTES
from kvxfer.router.auth import ApiKeys
from kvxfer.types import Role
from tests.support.fake_workers import FakeWorker, failing, router_over
from tests.support.raw_http import ask, request
from tests.support.worker_http import BODY, running_worker

KEY = "sk-one"
MESSAGES = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
SHOWN = {
    "bearer": ([("authorization", f"Bearer {KEY}")], 200),
    "x-api-key": ([("x-api-key", KEY)], 200),
    "both": ([("authorization", f"Bearer {KEY}"), ("x-api-key", KEY)], 200),
    "none": ([], 401),
    "empty": ([("x-api-key", "")], 401),
    "wrong": ([("x-api-key", "sk-two")], 401),
    "scheme": ([("x-api-key", f"Bearer {KEY}")], 401),
    "wrong in one": ([("authorization", f"Bearer {KEY}"), ("x-api-key", "sk-wrong")], 401),
    "wrong in the other": ([("authorization", "Bearer sk-wrong"), ("x-api-key", KEY)], 401),
    "another of ours": ([("authorization", f"Bearer {KEY}"), ("x-api-key", "sk-two-of-ours")], 401),
    "another scheme": ([("authorization", "Basic eDp5"), ("x-api-key", KEY)], 401),
    "empty in one": ([("authorization", f"Bearer {KEY}"), ("x-api-key", "")], 401),
    "two": ([("x-api-key", KEY), ("x-api-key", "sk-wrong")], 401),
    "two of the other": ([("authorization", f"Bearer {KEY}"), ("authorization", "Bearer sk-wrong")], 401),
}


@pytest.mark.parametrize("name", SHOWN)
async def test_a_key_stands_in_either_header_and_two_are_refused(name: str) -> None:
    shown, status = SHOWN[name]
    fake = FakeWorker("e0", Role.BOTH, dialect="plain")
    keys = ApiKeys((KEY, "sk-two-of-ours"))
    async with router_over(fake, keys=keys, pass_through=("/v1/x/=engine",)) as router:
        for method, path in (
            *(("POST", path) for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions")),
            *(("GET", "/v1/models"), ("GET", "/v1/workers"), ("POST", "/v1/x/y")),
        ):
            answer = await router.client.request(
                method, path, headers=shown, json=MESSAGES if method == "POST" else None
            )
            assert answer.status_code == status, (path, answer.text)
            if status == 401:
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert KEY not in answer.text
                assert (answer.json().get("type") == "error") is path.startswith("/v1/messages")
        assert not [1 for one in fake.received for header in one.headers if header in ("x-api-key", "authorization")]


async def test_without_keys_any_header_passes() -> None:
    async with router_over(FakeWorker("e0", Role.BOTH, dialect="plain")) as router:
        for shown, _ in SHOWN.values():
            assert (await router.client.post("/v1/messages", headers=shown, json=MESSAGES)).status_code == 200


async def test_an_engine_gets_either_as_authorization_where_keys_go_on() -> None:
    fake = FakeWorker("e0", Role.BOTH, dialect="plain")
    async with router_over(fake, forward_authorization=True) as router:
        for name in ("bearer", "x-api-key", "both"):
            await router.client.post("/v1/messages", headers=SHOWN[name][0], json=MESSAGES)
            assert fake.received[-1].headers["authorization"] == f"Bearer {KEY}"
            assert "x-api-key" not in fake.received[-1].headers


async def test_no_client_key_opens_an_admin_route_and_no_admin_key_stands_elsewhere(tmp_path: pathlib.Path) -> None:
    admin = tmp_path / "admin"
    admin.write_text("admin-secret\n")
    fake = FakeWorker("e0", Role.BOTH, dialect="plain")
    async with router_over(fake, keys=ApiKeys((KEY,)), admin_key_file=str(admin)) as router:
        for shown in ({"x-api-key": "admin-secret"}, {"x-api-key": KEY}):
            assert (await router.client.get("/workers", headers=shown)).status_code == 401
        assert (await router.client.post("/v1/messages", headers={"x-api-key": "admin-secret"})).status_code == 401


async def test_tokens_are_counted_by_one_worker_and_a_worker_that_cannot_says_so() -> None:
    fake = FakeWorker("e0", Role.BOTH, dialect="plain")
    async with router_over(fake) as router:
        answer = await router.client.post("/v1/messages/count_tokens", json=MESSAGES)
        assert answer.status_code == 200
        assert [one.path for one in fake.received] == ["/v1/messages/count_tokens"]
        assert fake.received[0].body == MESSAGES
        fake.always_fails = failing(404, "usage", retryable=False, kind="invalid_request_error")
        answer = await router.client.post("/v1/messages/count_tokens", json=MESSAGES)
        assert (answer.status_code, answer.json()["type"]) == (404, "error")
        answer = await router.client.post("/v1/messages/count_tokens", json={"messages": []})
        assert (answer.status_code, answer.json()["type"]) == (400, "error")
        assert "model" in answer.json()["error"]["message"]


# Compressed bodies.

ENCODINGS = ("gzip", "GZIP", "x-gzip", "deflate", "br", "zstd", "identity, gzip", "gzip, identity", "x" * 500, "\xff")


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_a_compressed_body_is_415_at_the_router(encoding: str) -> None:
    fake = FakeWorker("e0", Role.BOTH, dialect="plain")
    body = gzip.compress(json.dumps(MESSAGES).encode())
    async with router_over(fake, pass_through=("/v1/x/=engine",)) as router:
        port = int(router.url.rpartition(":")[2])
        for path in (*(api.path for api in ROUTES), "/v1/x/y", "/workers"):
            field = f"content-encoding: {encoding}"
            answer = await ask(port, request("POST", path, field, host="localhost", body=body))
            assert answer.status == 415, (path, answer)
            assert "content-encoding" in answer.json()["error"]["message"]
            unsent = request("POST", path, field, "content-length: 6000000", "expect: 100-continue", host="localhost")
            assert (await ask(port, unsent)).status == 415, path
            said = request("POST", path, field, "content-type: application/json", host="localhost", body=b"{}")
            assert (await ask(port, said)).status == 415, path
        assert not fake.received


async def test_a_body_that_is_as_it_says_is_read() -> None:
    fake = FakeWorker("e0", Role.BOTH, dialect="plain")
    async with router_over(fake) as router:
        for encoding in ("identity", "", "Identity"):
            answer = await router.client.post("/v1/messages", json=MESSAGES, headers={"content-encoding": encoding})
            assert answer.status_code == 200


async def test_a_compressed_body_is_415_at_a_worker(tiny_path: pathlib.Path) -> None:
    body = gzip.compress(json.dumps(BODY).encode())
    async with running_worker(tiny_path) as worker, httpx.AsyncClient(base_url=worker.url, trust_env=False) as client:
        for path in ("/v1/completions", "/v1/chat/completions"):
            answer = await client.post(path, content=body, headers={"content-encoding": "gzip"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-encoding")
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
