"""Admin routes: which callers may, what they do, and what they refuse by name."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from starlette.requests import Request

from kvxfer.router.admin import AdminAccess
from kvxfer.router.auth import ApiKeys
from tests.support.fake_workers import FakeWorker, router_over
from tests.support.raw_http import ask, request

ROUTES = [("GET", "/workers"), ("POST", "/workers"), ("POST", "/workers/d0/drain"), ("DELETE", "/workers/d0")]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_admin_routes_need_the_admin_key_where_there_is_one(
    method: str, path: str, tmp_path: pathlib.Path
) -> None:
    keys = tmp_path / "admin-keys"
    keys.write_text("admin-secret\n")
    d = FakeWorker("d0")
    async with router_over(d, keys=ApiKeys(("client-key",)), admin_key_file=str(keys)) as router:
        for headers in ({}, {"authorization": "Bearer client-key"}, {"authorization": "Basic admin-secret"}):
            answer = await router.client.request(method, path, headers=headers, json={})
            assert answer.status_code == 401, answer.text
            assert answer.json()["error"]["code"] == "invalid_api_key"
        allowed = {"authorization": "Bearer admin-secret"}
        answer = await router.client.request(method, path, headers=allowed, json={"url": "http://127.0.0.1:1"})
        assert answer.status_code in (200, 201), answer.text


def test_admin_routes_without_a_key_are_closed_beyond_loopback() -> None:
    request = Request({"type": "http", "method": "GET", "headers": [(b"host", b"127.0.0.1")]})
    AdminAccess(ApiKeys(), is_loopback=True).check(request)
    with pytest.raises(Exception, match="admin routes need an admin key") as caught:
        AdminAccess(ApiKeys(), is_loopback=False).check(request)
    assert getattr(caught.value, "status", None) == 403


EVERY = [*ROUTES, ("GET", "/ui/state")]


@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        *(
            ({"host": host}, True)
            for host in ("localhost:80", "LOCALHOST", "127.0.0.1:8000", "127.0.0.9", "[::1]:8000")
        ),
        *(({"host": host}, False) for host in ("evil.example:80", "localhost.evil.example", "10.0.0.1", "")),
        *(({"host": host}, False) for host in ("127.0.0.1.evil.example", "[::2]:80")),
        ({"host": "localhost:80", "origin": "http://localhost:80"}, True),
        ({"host": "localhost:80", "origin": "https://localhost:80"}, True),
        ({"host": "localhost:80", "origin": "http://evil.example"}, False),
        ({"host": "localhost:80", "origin": "http://localhost:81"}, False),
        ({"host": "localhost:80", "origin": "null"}, False),
        ({"host": "evil.example", "origin": "http://evil.example"}, False),
        ({"host": "evil.example", "sec-fetch-site": "same-origin"}, False),
        ({"host": "localhost:80", "sec-fetch-site": "cross-site"}, False),
        ({"host": "localhost:80", "sec-fetch-site": "same-site"}, False),
        ({"host": "localhost:80", "sec-fetch-site": "same-origin"}, True),
        ({"host": "localhost:80", "sec-fetch-site": "none"}, True),
    ],
)
async def test_without_a_key_a_page_of_another_name_is_kept_out(headers: dict[str, str], is_let_in: bool) -> None:
    async with router_over(FakeWorker("d0")) as router:
        for method, path in EVERY:
            answer = await router.client.request(method, path, headers=headers, json={})
            assert (answer.status_code != 403) is is_let_in, (method, path, answer.text)
            if not is_let_in:
                assert answer.json()["error"]["code"] == "admin_closed"
                assert "--admin-key-file" in answer.json()["error"]["message"]
        assert len((await router.client.get("/workers")).json()["data"]) == (0 if is_let_in else 1)


@pytest.mark.parametrize("host", ["a[::1]", "localhost:x", "localhost:80:80", "localhost, evil"])
async def test_a_host_that_is_none_reaches_no_route(host: str) -> None:
    async with router_over(FakeWorker("d0")) as router:
        for method, path in EVERY:
            answer = await router.client.request(method, path, headers={"host": host}, json={})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "protocol")
        assert len((await router.client.get("/workers")).json()["data"]) == 1


async def test_with_a_key_any_name_and_origin_may_ask(tmp_path: pathlib.Path) -> None:
    keys = tmp_path / "admin-keys"
    keys.write_text("admin-secret\n")
    async with router_over(FakeWorker("d0"), admin_key_file=str(keys)) as router:
        headers = {"host": "router.example", "origin": "https://a.example", "authorization": "Bearer admin-secret"}
        assert (await router.client.get("/workers", headers=headers)).status_code == 200


async def test_an_admin_adds_drains_and_removes_a_worker() -> None:
    d, other = FakeWorker("d0"), FakeWorker("d1")
    async with other.running(), router_over(d) as router:
        added = {"url": other.url, "role": "decode", "dialect": "kvxfer", "name": "added", "model": "tiny"}
        answer = await router.client.post("/workers", json=added)
        assert (answer.status_code, answer.json()) == (201, {"agent_id": "added"})
        assert (await router.client.post("/workers", json=added)).status_code == 400
        listed = {worker["agent_id"]: worker for worker in (await router.client.get("/workers")).json()["data"]}
        assert set(listed) == {"d0", "added"}
        assert listed["added"]["source"] == "admin"

        assert (await router.client.post("/workers/d0/drain")).json() == {"agent_id": "d0", "is_draining": True}
        for _ in range(4):
            assert (await router.complete()).status_code == 200
        assert (len(d.received), len(other.received)) == (0, 4)
        assert (await router.client.post("/workers/d0/drain", params={"on": False})).status_code == 200

        assert (await router.client.delete("/workers/added")).status_code == 200
        assert (await router.complete()).status_code == 200
        assert (len(d.received), len(other.received)) == (1, 4)


@pytest.mark.parametrize(
    ("worker", "param"),
    [
        ({}, "url"),
        ({"url": 3}, "url"),
        ({"url": "ftp://a"}, None),
        ({"url": "http://169.254.169.254"}, None),
        ({"url": "http://169.254.1.1"}, None),
        ({"url": "http://[::ffff:169.254.1.1]:1"}, None),
        ({"url": "http://2852039166"}, None),
        ({"url": "http://127.0.0.1:1", "role": "cook"}, "role"),
        ({"url": "http://127.0.0.1:1", "colour": "red"}, "colour"),
        ({"url": "http://127.0.0.1:1", "dialect": "klingon"}, None),
        ({"url": "http://127.0.0.1:1", "dp_rank": True}, "dp_rank"),
        ({"url": "http://127.0.0.1:1", "dp_rank": -1}, None),
        ({"url": "http://127.0.0.1:1", "dialect": "vllm", "bootstrap_port": 5}, None),
    ],
)
async def test_a_worker_that_cannot_be_is_refused_by_name(worker: dict[str, Any], param: str | None) -> None:
    async with router_over(FakeWorker("d0")) as router:
        answer = await router.client.post("/workers", json=worker)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert len((await router.client.get("/workers")).json()["data"]) == 1


@pytest.mark.parametrize("body", ["", "[]", "no json", '"text"'])
async def test_a_body_that_describes_no_worker_is_400_in_openais_shape(body: str) -> None:
    async with router_over(FakeWorker("d0")) as router:
        answer = await router.client.post("/workers", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_that_is_not_said_to_be_json_is_told_what_is_missing() -> None:
    async with router_over(FakeWorker("d0")) as router:
        for sent in (None, b'{"url": "http://127.0.0.1:1"}'):
            answer = await router.client.post("/workers", content=sent)
            assert answer.status_code == 400
            assert "content-type: application/json" in answer.json()["error"]["message"]


async def test_a_caller_that_may_not_is_told_before_its_body_is_read(tmp_path: pathlib.Path) -> None:
    keys = tmp_path / "admin-keys"
    keys.write_text("admin-secret\n")
    async with router_over(FakeWorker("d0"), admin_key_file=str(keys)) as router:
        port = int(router.url.rpartition(":")[2])
        unsent = request("POST", "/workers", "content-type: application/json", "content-length: 6000000")
        assert (await ask(port, unsent)).status == 401
        shown = request("POST", "/workers", "authorization: Bearer admin-secret", f"content-length: {1 << 40}")
        assert (await ask(port, shown)).status == 413


@pytest.mark.parametrize(("method", "path"), [("POST", "/workers/none/drain"), ("DELETE", "/workers/none")])
async def test_a_worker_that_is_not_known_is_404_by_name(method: str, path: str) -> None:
    async with router_over(FakeWorker("d0")) as router:
        answer = await router.client.request(method, path)
        assert answer.status_code == 404
        assert "'none'" in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "worker_not_found"


async def test_models_by_name_and_the_document_of_the_api() -> None:
    async with router_over(FakeWorker("d0", model="org/model")) as router:
        assert (await router.client.get("/v1/models/org/model")).json()["id"] == "org/model"
        assert (await router.client.get("/v1/models/other")).status_code == 404
        paths = (await router.client.get("/openapi.json")).json()["paths"]
        assert {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/workers", "/metrics"} <= set(paths)
        assert (await router.client.get("/docs")).status_code == 200
