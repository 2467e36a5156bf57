"""CORS: which origins are told that they may read answers, on hot and on control routes; off by default."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ConfigError
from kvxfer.policy.admit import AdmitOptions
from kvxfer.router.admin import AdminAccess
from kvxfer.router.app import build_app
from kvxfer.router.auth import ApiKeys
from kvxfer.router.core import RouterCore
from kvxfer.router.cors import EXPOSED, Cors, is_for_pages
from kvxfer.router.fleet.workers import Workers
from kvxfer.router.front import Door, Front
from kvxfer.router.metrics import RouterMetrics
from kvxfer.router.options import RouterOptions
from kvxfer.serving.bodies import Bodies
from kvxfer.types import Role
from tests.support.fake_workers import FakeWorker, Running, router_over

PAGE = "https://app.example.com"
OTHER = "https://evil.example.com"
CORS = "access-control-"


def pair() -> tuple[FakeWorker, FakeWorker]:
    return FakeWorker("p0", Role.PREFILL), FakeWorker("d0", Role.DECODE)


def told(answer: httpx.Response) -> dict[str, str]:
    """The CORS headers, each of which stands once."""
    names = [name for name, _ in answer.headers.multi_items()]
    assert all(names.count(name) == 1 for name in names if name.startswith(CORS)), names
    return {name: value for name, value in answer.headers.items() if name.startswith(CORS)}


def allowing(origin: str = PAGE) -> dict[str, str]:
    return {f"{CORS}allow-origin": origin, f"{CORS}expose-headers": EXPOSED.decode()}


async def preflight(router: Running, path: str, origin: str = PAGE, **more: str) -> httpx.Response:
    headers = {"origin": origin, f"{CORS}request-method": "POST", **more}
    return await router.client.request("OPTIONS", path, headers=headers)


# The function.


@pytest.mark.parametrize(
    "origins",
    [
        ("null",),
        ("app.example.com",),
        ("https://app.example.com/",),
        ("https://app.example.com/path",),
        ("https://APP.example.com",),
        ("https://*.example.com",),
        ("https://a b",),
        ("https://a\r\nx: y",),
        ("",),
        ("*", PAGE),
        tuple(f"https://a{number}" for number in range(65)),
    ],
)
def test_origins_are_exact(origins: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="cors_origin"):
        Cors(origins)
    with pytest.raises(ConfigError, match="cors_origin"):
        RouterOptions(cors_origin=origins)


def test_any_origin_and_credentials_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="cors_credentials"):
        RouterOptions(cors_origin=("*",), cors_credentials=True)
    with pytest.raises(ConfigError, match="cors_credentials"):
        RouterOptions(cors_credentials=True)
    cors = Cors([PAGE], allows_credentials=True)
    assert (b"access-control-allow-credentials", b"true") in cors.answer_headers(PAGE.encode())
    assert (b"access-control-allow-credentials", b"true") not in Cors(["*"]).answer_headers(PAGE.encode())


def test_origins_with_ports_addresses_and_other_schemes() -> None:
    origins = ["http://localhost:3000", "http://127.0.0.1:8080", "http://[::1]:80", "tauri://localhost"]
    cors = Cors(origins)
    assert all(cors.allows(origin.encode()) for origin in origins)
    assert not cors.allows(b"http://localhost:3001")
    assert not cors.allows(b"http://localhost")
    assert not cors.allows(None)


@given(st.binary(max_size=60))
def test_no_other_origin_is_allowed(origin: bytes) -> None:
    cors = Cors([PAGE])
    if origin != PAGE.encode():
        assert cors.answer_headers(origin) == ((b"vary", b"origin"),)
        assert cors.preflight_headers(origin, b"POST", b"x") == ((b"vary", b"origin"),)


@given(st.binary(max_size=60), st.binary(max_size=60), st.binary(max_size=60))
def test_a_preflight_echoes_nothing_that_is_no_list_of_names(origin: bytes, method: bytes, wanted: bytes) -> None:
    for name, value in Cors(["*"]).preflight_headers(origin, method, wanted) or ():
        assert b"\n" not in value
        assert b"\r" not in value
        if name == b"access-control-allow-headers":
            assert value == wanted


def test_admin_routes_answer_no_other_origin() -> None:
    for path in ("/workers", "/workers/a", "/workers/a/drain", "/ui", "/ui/state"):
        assert not is_for_pages(path)
    for path in ("/v1/workers", "/workersx", "/v1/completions", "/metrics"):
        assert is_for_pages(path)


# At a running router.


async def test_off_by_default() -> None:
    p, d = pair()
    async with router_over(p, d) as router:
        for answer in (
            await router.complete(headers={"origin": PAGE}),
            await router.client.get("/v1/models", headers={"origin": PAGE}),
        ):
            assert answer.status_code == 200
            assert told(answer) == {}
            assert "vary" not in answer.headers
        assert (await preflight(router, "/v1/completions")).status_code == 405


async def test_hot_and_control_routes_tell_the_page() -> None:
    p, d = pair()
    async with router_over(p, d, cors_origin=(PAGE,)) as router:
        page = {"origin": PAGE}
        answers = [
            await router.complete(headers=page),
            await router.complete(headers=page, stream=True),
            await router.client.post("/v1/completions", content=b"{", headers=page),
            await router.client.get("/v1/models", headers=page),
            await router.client.get("/v1/models/nothing", headers=page),
            await router.client.get("/nowhere", headers=page),
            await router.client.get("/health", headers=page),
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 400, 200, 404, 404, 200]
        for answer in answers:
            assert told(answer) == allowing()
            assert answer.headers["vary"] == "origin"
            assert answer.headers["x-request-id"]


async def test_other_origins_are_told_nothing() -> None:
    p, d = pair()
    async with router_over(p, d, cors_origin=(PAGE, "http://localhost:3000")) as router:
        for headers in ({"origin": OTHER}, {"origin": "null"}, {}):
            for answer in (
                await router.complete(headers=headers),
                await router.client.get("/v1/models", headers=headers),
            ):
                assert answer.status_code == 200
                assert told(answer) == {}
                assert answer.headers["vary"] == "origin"
        answer = await preflight(router, "/v1/completions", OTHER)
        assert told(answer) == {}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/v1/audio/x"])
async def test_preflights_are_answered_without_a_key(path: str) -> None:
    p, d = pair()
    options = {"cors_origin": (PAGE,), "cors_credentials": True, "pass_through": ("/v1/audio/=decode",)}
    async with router_over(p, d, keys=ApiKeys(("a-secret-key",)), **options) as router:
        wanted = "authorization, content-type, x-stainless-os"
        answer = await preflight(router, path, **{f"{CORS}request-headers": wanted})
        assert answer.status_code == 204
        assert told(answer) == {
            f"{CORS}allow-origin": PAGE,
            f"{CORS}allow-methods": "GET, POST",
            f"{CORS}allow-headers": wanted,
            f"{CORS}allow-credentials": "true",
            f"{CORS}max-age": "600",
        }
        refused = await router.complete(headers={"origin": PAGE})
        assert refused.status_code == 401  # and the page can read why
        assert told(refused) == {**allowing(), f"{CORS}allow-credentials": "true"}


async def test_any_origin() -> None:
    p, d = pair()
    async with router_over(p, d, cors_origin=("*",)) as router:
        for origin in (PAGE, "null"):
            answer = await router.complete(headers={"origin": origin})
            assert told(answer) == allowing("*")
            assert "vary" not in answer.headers
        assert told(await preflight(router, "/v1/completions"))[f"{CORS}allow-origin"] == "*"


async def test_admin_routes_tell_no_page_even_where_any_origin_is_allowed() -> None:
    p, d = pair()
    async with router_over(p, d, cors_origin=("*",)) as router:
        for path, status in (("/workers", 403), ("/ui/state", 403), ("/ui", 200)):
            listed = await router.client.get(path, headers={"origin": PAGE})
            assert listed.status_code == status
            assert told(listed) == {}
        for path in ("/workers", "/workers/d0/drain", "/ui/state"):
            answer = await preflight(router, path)
            assert answer.status_code == 405
            assert told(answer) == {}


async def test_options_that_are_no_preflight_go_on() -> None:
    p, d = pair()
    async with router_over(p, d, cors_origin=(PAGE,)) as router:
        answer = await router.client.request("OPTIONS", "/v1/completions", headers={"origin": PAGE})
        assert answer.status_code == 405
        assert told(answer) == allowing()


async def test_a_hot_route_over_asgi_tells_it_once() -> None:
    options = RouterOptions(cors_origin=(PAGE,))
    workers, bodies, door = Workers(), Bodies(options), Door(AdmitOptions())
    core = RouterCore(options, workers, RouterMetrics(workers))
    keys, cors = ApiKeys(), Cors(options.cors_origin)
    front = Front(core, keys, door, cors)
    app = build_app(core, keys, door, front, AdminAccess(keys, is_loopback=True), bodies, cors)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        answer = await client.post("/v1/completions", json={"model": "x", "prompt": "x"}, headers={"origin": PAGE})
        assert answer.status_code == 503
        assert told(answer) == allowing()
        assert answer.headers.get_list("vary") == ["origin"]
    await core.aclose()
    await workers.close()
