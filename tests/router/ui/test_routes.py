"""The operators' page over HTTP: its files, what a browser may do with them, and its feed."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

import kvxfer.router.ui
from kvxfer import __version__
from kvxfer.router.ui.routes import CONTENT_SECURITY_POLICY, FILES
from kvxfer.types import Role
from tests.support.fake_workers import MODEL, FakeWorker, Running, eventually, failing, router_over

FOLDER = pathlib.Path(kvxfer.router.ui.__file__).parent
ACCOUNT = {"prefill": "remote", "lane": "cma", "blocks_moved": 4, "bytes_moved": 4096, "transfer_s": 0.25}
PROMPT = "a prompt that no operator is to read"
DECISION: dict[str, Any] = {
    "ended_unix_s": float,
    "route": str,
    "model": str,
    "is_stream": bool,
    "prefill": str,
    "decode": str,
    "reason": str,
    "outcome": str,
    "is_failure": bool,
    "status": int,
    "ttft_s": (float, type(None)),
    "duration_s": float,
    "attempts": int,
    "code": str,
}


def pair() -> tuple[FakeWorker, FakeWorker]:
    p, d = FakeWorker("p0", Role.PREFILL), FakeWorker("d0", Role.DECODE)
    d.account = ACCOUNT
    return p, d


async def state_when(router: Running, is_there: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first state of which ``is_there`` holds: a request is counted after its last byte, and a state is shared."""
    found: list[dict[str, Any]] = []

    async def look() -> bool:
        answer = await router.client.get("/ui/state")
        assert answer.status_code == 200, answer.text
        found.append(answer.json())
        return is_there(found[-1])

    await eventually(look, within_s=10.0)
    return found[-1]


def decided(count: int) -> Callable[[dict[str, Any]], bool]:
    return lambda state: len(state["decisions"]) == count


async def test_the_page_and_its_files_are_served_with_a_strict_policy() -> None:
    async with router_over() as router:
        for path, (name, media_type) in FILES.items():
            answer = await router.client.get(path)
            assert answer.status_code == 200
            assert answer.content == (FOLDER / name).read_bytes()
            assert answer.headers["content-type"] == media_type
            assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
        assert (await router.client.get("/ui/")).status_code == 404
        for path in ("/ui/routes.py", "/ui/state.py", "/ui/../app.py", "/ui/%2e%2e/app.py", "/ui/index.html"):
            assert (await router.client.get(path)).status_code == 404


def test_the_policy_allows_no_inline_script_and_no_other_place() -> None:
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert "default-src 'none'" in CONTENT_SECURITY_POLICY
    sources = {source for part in CONTENT_SECURITY_POLICY.split("; ") for source in part.split()[1:]}
    assert sources == {"'none'", "'self'"}


def test_every_file_of_the_page_is_served_and_nothing_else() -> None:
    pages = {path.name for path in FOLDER.iterdir() if path.suffix not in (".py", "") and path.is_file()}
    assert pages == {name for name, _ in FILES.values()}


def test_the_page_asks_no_other_place_and_reads_no_text_as_html() -> None:
    """No script, style or handler inline, no address of another place, and none of the ways from a string to HTML."""
    for name, _ in FILES.values():
        text = (FOLDER / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"^\s*//.*|\s// .*", "", text, flags=re.MULTILINE), name
        assert not re.search(r"\bon\w+\s*=\s*[\"']|\bstyle\s*=|<style|javascript:", text), name
        ways = r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|document\.write|DOMParser|\beval\b|\bFunction\(|srcdoc"
        assert not re.search(ways, text), name
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", (FOLDER / "index.html").read_text(), re.DOTALL)
    assert scripts == [""]


async def test_the_state_has_what_the_page_shows() -> None:
    p, d = pair()
    async with router_over(p, d) as router:
        streamed = await router.complete(prompt=PROMPT, stream=True)
        assert streamed.status_code == 200
        assert (await router.complete(prompt=PROMPT)).status_code == 200
        state = await state_when(router, decided(2))
        listed = (await router.client.get("/workers")).json()["data"]
    assert state["version"] == __version__
    assert state["router"] == {
        "status": "ok",
        "inflight": 0,
        "inflight_max": 1024,
        "coordinator": "",
        "coordinator_connected": True,
        "models": [MODEL],
    }
    assert [worker["agent_id"] for worker in state["workers"]] == ["d0", "p0"]
    assert [set(worker) for worker in state["workers"]] == [set(worker) for worker in listed]
    [moved] = state["pairs"]
    assert moved == {
        "prefill": "p0",
        "decode": "d0",
        "requests": 2,
        "transfers": 2,
        "failures": 0,
        "bytes": 8192,
        "blocks": 8,
        "lane": "cma",
        "transfer_p50_s": 0.25,
        "transfer_p95_s": 0.25,
        "is_ejected": False,
    }
    [lane] = state["lanes"]
    assert (lane["lane"], lane["transfers"], lane["transfer_p50_s"]) == ("cma", 2, 0.25)
    for decision in state["decisions"]:
        assert set(decision) == set(DECISION)
        for name, kind in DECISION.items():
            assert isinstance(decision[name], kind), name
        assert (decision["prefill"], decision["decode"], decision["reason"]) == ("p0", "d0", "remote")
        assert (decision["outcome"], decision["status"], decision["attempts"]) == ("ok", 200, 1)
    whole, stream = state["decisions"]
    assert (whole["is_stream"], whole["ttft_s"]) == (False, None)
    assert stream["is_stream"]
    assert 0.0 < stream["ttft_s"] <= stream["duration_s"]
    series = state["series"]
    steps = series["steps"]
    assert sum(step["requests"] for step in steps) == 2
    assert sum(step["ttft_count"] for step in steps) == 1
    ends = [step["begun_unix_s"] + series["step_s"] for step in steps]
    assert all(series["ends_unix_s"] - series["span_s"] < end <= series["ends_unix_s"] + 1.0 for end in ends)
    assert state["counters"]["requests"] == {"ok": 2}
    assert state["counters"]["placements"] == {"remote": 2}


async def test_the_state_names_no_prompt_and_no_client() -> None:
    async with router_over(*pair()) as router:
        assert (await router.complete(prompt=PROMPT, user="client-seven", stream=True)).status_code == 200
        assert (await router.complete(prompt=PROMPT, model="another")).status_code == 404
        await state_when(router, decided(2))
        text = (await router.client.get("/ui/state")).text
        assert PROMPT not in text
        assert "client-seven" not in text
        assert not re.search(r'"(client|peer|remote)_?(addr|address|ip|host)"', text)


async def test_a_request_that_failed_says_why() -> None:
    p, d = pair()
    d.always_fails = failing(500, "internal", retryable=False)
    async with router_over(p, d, attempts_max=1) as router:
        assert (await router.complete()).status_code >= 500
        state = await state_when(router, decided(1))
        [decision] = state["decisions"]
        assert decision["is_failure"]
        assert decision["outcome"] == "failed"
        assert decision["code"] == "internal"
        assert sum(step["failures"] for step in state["series"]["steps"]) == 1
        assert sum(state["counters"]["leg_failures"].values()) >= 1


async def test_a_state_that_has_not_changed_is_not_sent_again() -> None:
    async with router_over(*pair()) as router:
        await router.complete()
        await state_when(router, decided(1))
        for _ in range(20):  # a new step of the series begins each 5 s, and that is a change
            first = await router.client.get("/ui/state")
            again = await router.client.get("/ui/state", headers={"if-none-match": first.headers["etag"]})
            if again.status_code == 304:
                break
        assert again.status_code == 304
        assert again.content == b""
        assert again.headers["etag"] == first.headers["etag"]
        assert first.headers["cache-control"] == "no-store"
        assert first.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        await router.complete()
        etag = first.headers["etag"]

        async def has_changed() -> bool:
            return (await router.client.get("/ui/state", headers={"if-none-match": etag})).status_code == 200

        await eventually(has_changed, within_s=10.0)


async def test_the_feed_needs_the_admin_key_and_the_page_none(tmp_path: pathlib.Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    async with router_over(*pair(), admin_key_file=str(keys)) as router:
        assert (await router.client.get("/ui")).status_code == 200
        refused = await router.client.get("/ui/state")
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        wrong = await router.client.get("/ui/state", headers={"authorization": "Bearer other"})
        assert wrong.status_code == 401
        allowed = await router.client.get("/ui/state", headers={"authorization": "Bearer sesame"})
        assert allowed.status_code == 200
        etag = allowed.headers["etag"]
        assert (await router.client.get("/ui/state", headers={"if-none-match": etag})).status_code == 401


async def test_the_feed_is_closed_beyond_loopback_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.router.server.is_loopback", lambda host: False)
    async with router_over(*pair()) as router:
        answer: httpx.Response = await router.client.get("/ui/state")
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "admin_closed"
