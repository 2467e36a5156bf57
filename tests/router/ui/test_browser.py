"""The operators' page in a real browser: what it shows, what it never does, and that it can be read and used by all."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvxfer.types import Role
from tests.support.browser import WITHOUT, Browser, Tab, browsing, find_browser
from tests.support.fake_workers import FakeWorker, Running, router_over

pytestmark = pytest.mark.skipif(find_browser() is None, reason=WITHOUT)

ACCOUNT = {"prefill": "remote", "lane": "cma", "blocks_moved": 4, "bytes_moved": 4096, "transfer_s": 0.25}
CONTRASTS = """
(() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = parts(colour).slice(0, 3).map((one) => {
      const share = one / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if ((parts(colour)[3] ?? 1) > 0.5) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const worst = [];
  for (const node of document.body.querySelectorAll("*")) {
    const hasText = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!hasText || !node.checkVisibility()) continue;
    const [one, other] = [light(getComputedStyle(node).color), light(behind(node))].sort((a, b) => b - a);
    worst.push([(one + 0.05) / (other + 0.05), node.tagName, node.className, node.textContent.slice(0, 40)]);
  }
  return worst.sort((a, b) => a[0] - b[0]).slice(0, 5);
})()
"""
"""The five texts that differ least from what is behind them, by WCAG's contrast ratio."""


@contextlib.asynccontextmanager
async def page(
    tmp_path: pathlib.Path, *fakes: FakeWorker, scheme: str = "light", **options: Any
) -> AsyncIterator[tuple[Running, Browser, Tab]]:
    """A router over the fakes, and its page in a browser."""
    async with router_over(*fakes, **options) as router, browsing(tmp_path / "profile") as browser:
        tab = await browser.open(f"{router.url}/ui", scheme=scheme)
        yield router, browser, tab


def pair(**account: Any) -> tuple[FakeWorker, FakeWorker]:
    p, d = FakeWorker("p0", Role.PREFILL), FakeWorker("d0", Role.DECODE)
    d.account = {**ACCOUNT, **account}
    return p, d


def cells(section: str) -> str:
    """JavaScript that gives a table's texts, by row."""
    rows = f"document.querySelector('#{section} tbody').rows"
    return f"[...{rows}].map((row) => [...row.cells].map((cell) => cell.textContent))"


async def test_the_page_shows_the_fleet_and_what_happens_to_it(tmp_path: pathlib.Path) -> None:
    async with page(tmp_path, *pair()) as (router, _, tab):
        await tab.until("document.getElementById('status').textContent === 'Serving.'")
        workers = await tab.value(cells("workers"))
        assert [(row[0], row[1], row[2]) for row in workers] == [("d0", "decode", "ready"), ("p0", "prefill", "ready")]
        assert await tab.value("document.querySelector('#decisions .empty').checkVisibility()")
        for _ in range(3):
            assert (await router.complete(stream=True)).status_code == 200
        await tab.until("document.querySelector('#decisions tbody').rows.length === 3")
        [moved] = await tab.value(cells("pairs"))
        assert moved == ["p0", "d0", "in use", "cma", "3", "3", "0", "12.0 KiB", "250 ms", "250 ms"]
        [lane] = await tab.value(cells("lanes"))
        assert lane == ["cma", "3", "0", "12.0 KiB", "250 ms", "250 ms"]
        for row in await tab.value(cells("decisions")):
            assert row[1:9] == ["/v1/completions", "tiny", "p0", "d0", "remote", "ok", "200", "\u2013"]
        charts = "[...document.querySelectorAll('#charts svg')]"
        await tab.until(f"{charts}[0].querySelector('.line-0').getAttribute('d').startsWith('M')")
        assert "p50" in await tab.value(f"{charts}[0].getAttribute('aria-label')")
        assert all(url.startswith(f"{router.url}/ui") for url in tab.asked())
        assert len(tab.asked()) > 5
        assert tab.troubles() == []


async def test_a_workers_words_stay_words(tmp_path: pathlib.Path) -> None:
    lane = "<img src=x onerror=document.title=1>"
    async with page(tmp_path, *pair(lane=lane)) as (router, _, tab):
        assert (await router.complete()).status_code == 200
        await tab.until("document.querySelector('#lanes tbody').rows.length === 1")
        assert (await tab.value(cells("lanes")))[0][0] == lane
        assert await tab.value("document.querySelectorAll('img').length") == 0
        assert await tab.value("document.title") == "kvxfer router"
        assert tab.troubles() == []


async def test_the_policy_holds_in_the_browser(tmp_path: pathlib.Path) -> None:
    async with page(tmp_path, *pair()) as (_, _, tab):
        await tab.value(
            "(() => { const one = document.createElement('script'); one.textContent = 'window.ran = 1';"
            "document.body.append(one); })()"
        )
        assert await tab.value("typeof window.ran") == "undefined"
        went = "fetch('http://127.0.0.1:1/').then(() => 'went', () => 'did not')"
        assert await tab.value(went) == "did not"
        said = " ".join(trouble.get("text", "") for trouble in tab.troubles())
        assert "Content Security Policy" in said


async def test_the_key_is_asked_for_and_stays_in_the_tab(tmp_path: pathlib.Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    async with page(tmp_path, *pair(), admin_key_file=str(keys)) as (router, browser, tab):
        await tab.until("document.getElementById('ask').checkVisibility()")
        assert not await tab.value("document.getElementById('page').checkVisibility()")

        async def enter(key: str) -> None:
            await tab.value("document.getElementById('key').focus()")
            await tab.type(key)
            await tab.press("Enter")

        await enter("wrong")
        await tab.until("document.getElementById('status').textContent.includes('does not open')")
        assert await tab.value("sessionStorage.length") == 0
        await enter("sesame")
        await tab.until("document.querySelector('#workers tbody').rows.length === 2")
        assert await tab.value("[document.cookie, localStorage.length, sessionStorage.length]") == ["", 0, 1]
        assert await tab.value("document.getElementById('key').value") == ""
        assert all("sesame" not in url for url in tab.asked())
        other = await browser.open(f"{router.url}/ui")
        await other.until("document.getElementById('ask').checkVisibility()")
        await tab.value("document.getElementById('forget').click()")
        await tab.until("document.getElementById('ask').checkVisibility()")
        assert await tab.value("sessionStorage.length") == 0


async def test_the_keyboard_sorts_and_filters_a_thousand_workers(tmp_path: pathlib.Path) -> None:
    async with page(tmp_path, *pair()) as (router, _, tab):
        many = [FakeWorker(f"w{number:04}", Role.PREFILL if number % 2 else Role.DECODE) for number in range(1000)]
        router.publish(*many)
        await tab.until("document.querySelector('#workers .tally').textContent === '1000'")
        assert await tab.value("document.querySelector('#workers tbody').rows.length") == 100
        assert (await tab.value(cells("workers")))[0][0] == "w0000"
        await tab.value("document.querySelector('#workers thead button').focus()")
        assert await tab.value("document.querySelector('#workers thead th').getAttribute('aria-sort')") == "ascending"
        await tab.press("Enter")
        assert await tab.value("document.querySelector('#workers thead th').getAttribute('aria-sort')") == "descending"
        assert (await tab.value(cells("workers")))[0][0] == "w0999"
        await tab.press("Tab")
        assert await tab.value("document.activeElement.textContent") == "Role"
        await tab.value("document.querySelector('#workers .more').click()")
        assert await tab.value("document.querySelector('#workers tbody').rows.length") == 200
        await tab.value("document.querySelector('#workers input').focus()")
        await tab.type("w050 decode")
        assert await tab.value("document.querySelector('#workers .tally').textContent") == "5 of 1000"
        shown = [row[0] for row in await tab.value(cells("workers"))]
        assert shown == ["w0508", "w0506", "w0504", "w0502", "w0500"]
        assert tab.troubles() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_text_can_be_read(tmp_path: pathlib.Path, scheme: str) -> None:
    p, d = pair()
    idle = FakeWorker("d1", Role.DECODE, model="other")
    async with page(tmp_path, p, d, idle, scheme=scheme) as (router, _, tab):
        router.workers.drain("d1", True)
        assert (await router.complete(stream=True)).status_code == 200
        assert (await router.complete(model="unknown")).status_code == 404
        await tab.until("document.querySelector('#decisions tbody').rows.length === 2")
        ground = await tab.value("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(246, 247, 249)") is (scheme == "light")
        worst = await tab.value(CONTRASTS)
        assert worst[0][0] >= 4.5, worst


async def test_tables_have_headers_and_names(tmp_path: pathlib.Path) -> None:
    async with page(tmp_path, *pair()) as (_, _, tab):
        await tab.until("document.querySelector('#workers tbody').rows.length === 2")
        assert await tab.value("document.documentElement.lang") == "en"
        nameless = (
            "[...document.querySelectorAll('table')].filter((table) =>"
            " !document.getElementById(table.getAttribute('aria-labelledby'))?.textContent"
            " || [...table.tHead.rows[0].cells].some((cell) => cell.scope !== 'col' || !cell.textContent)).length"
        )
        assert await tab.value(nameless) == 0
        assert await tab.value("document.querySelector('#workers tbody th').scope") == "row"
        inputs = "[...document.querySelectorAll('input')].filter((one) => !one.labels.length && !one.ariaLabel).length"
        assert await tab.value(inputs) == 0


async def test_the_page_says_that_the_router_is_gone_and_goes_on_when_told(tmp_path: pathlib.Path) -> None:
    async with browsing(tmp_path / "profile") as browser:
        async with router_over(*pair()) as router:
            tab = await browser.open(f"{router.url}/ui")
            await tab.until("document.getElementById('status').textContent === 'Serving.'")
            await tab.value("document.getElementById('pause').click()")
            assert await tab.value("document.getElementById('status').textContent") == "Paused."
            await tab.value("document.getElementById('pause').click()")
            await tab.until("document.getElementById('status').textContent === 'Serving.'")
        await tab.until("document.getElementById('status').textContent === 'The router cannot be reached.'")
        assert await tab.value("document.querySelector('#workers tbody').rows.length") == 2
