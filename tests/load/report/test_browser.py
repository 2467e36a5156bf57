"""The report in a real browser: every figure is drawn, in both schemes, and nothing leaves the page."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import AsyncIterator

import pytest

from kvxfer.load.artefacts import RunDirectory, read
from kvxfer.load.report.columns import columns_of
from kvxfer.load.report.figure import ReportFigure
from kvxfer.load.report.rates import SummarizedRun
from kvxfer.load.report.write import figures_of, write_report
from tests.load.report.test_page import HOSTILE
from tests.router.ui.test_browser import CONTRASTS
from tests.support.browser import WITHOUT, Browser, Tab, browsing, find_browser
from tests.support.load_made_up import MadeUp, finished, made_up_run, made_up_search, made_up_sweep
from tests.support.load_records import failed, run_of

pytestmark = [pytest.mark.deep, pytest.mark.skipif(find_browser() is None, reason=WITHOUT)]

SEEN = """
[...document.querySelectorAll(".plot")].map((plot) => {
  const box = plot.querySelector("svg.main-svg")?.getBoundingClientRect();
  const marks = ".point, .lines > path, .bars path, .hm image, .trace path";
  const of = (name) => [...plot.querySelectorAll(name)].filter((one) => one.getBoundingClientRect().width > 0);
  return { key: plot.id.slice(5), width: box?.width ?? 0, height: box?.height ?? 0, marks: of(marks).length,
           traces: plot.data.length, texts: of("text").length };
})
"""
OVERLAPS = """
[...document.querySelectorAll(".plot")].flatMap((plot) => {
  const labels = [...plot.querySelectorAll(
    ".xtick text, .x2tick text, .x3tick text, .ytick text, .y2tick text, .y3tick text, .legendtext, .xtitle, .x2title"
    + ", .x3title, .annotation-text")].filter((one) => one.textContent.trim());
  const boxes = labels.map((one) => [one.textContent, one.getBoundingClientRect()]);
  const wrong = [];
  for (let at = 0; at < boxes.length; at++) {
    for (let other = at + 1; other < boxes.length; other++) {
      const [a, b] = [boxes[at][1], boxes[other][1]];
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 1 && down > 2) wrong.push([plot.id, boxes[at][0], boxes[other][0]]);
    }
  }
  return wrong;
})
"""
"""Labels of axes, legends and lines that cover each other."""

COLOUR = "getComputedStyle(node).color"


@contextlib.asynccontextmanager
async def report(
    tmp_path: pathlib.Path, made: MadeUp, scheme: str = "light"
) -> AsyncIterator[tuple[Browser, Tab, str]]:
    out = tmp_path / "out"
    with RunDirectory.create(out) as directory:
        for run in made.runs:
            for record in run.records:
                directory.append(record)
        directory.finish(made.kind, made.runs, made.summaries, made.verdicts, made.extra)
    url = write_report(out, read(out)).as_uri()
    async with browsing(tmp_path / "profile") as browser:
        tab = await browser.open(url, scheme=scheme)
        await tab.until("document.documentElement.dataset.drawn !== undefined")
        yield browser, tab, url


def many_workers() -> MadeUp:
    """Forty of each kind, and a name that is too long."""
    runs = [made_up_run(f"{'long name ' * 9}{at}", requests=400, rate=100.0 + at, split=(40, 40)) for at in range(10)]
    for run in runs:
        run.point |= {"policy": "a policy with a long name", "lane": f"lane {run.name[-1]}"}
    return finished("sweep", runs)


def figures_in(path: pathlib.Path) -> list[ReportFigure]:
    stored = read(path)
    summarized = [SummarizedRun(*pair) for pair in zip(stored.runs, stored.summaries, strict=True)]
    return figures_of(summarized, [columns_of(run) for run in stored.runs], stored)


def asked_elsewhere(tab: Tab, url: str) -> list[str]:
    """Addresses other than the page's own; ``data:`` and ``blob:`` leave nothing."""
    return [one for one in tab.asked() if one != url and not one.startswith(("data:", "blob:"))]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "made", [made_up_search(200), made_up_sweep(60), many_workers()], ids=["search", "sweep", "many"]
)
async def test_every_figure_is_drawn(tmp_path: pathlib.Path, made: MadeUp, scheme: str) -> None:
    async with report(tmp_path, made, scheme) as (_, tab, url):
        seen = {one["key"]: one for one in await tab.value(SEEN)}
        figures = [one for one in figures_in(tmp_path / "out") if not one.missing]
        assert list(seen) == [figure.key for figure in figures]
        for figure in figures:
            one = seen[figure.key]
            assert one["width"] > 800, one
            assert abs(one["height"] - figure.height) < 2, one
            assert one["traces"] == len(figure.traces)
            assert one["marks"] >= sum(bool(trace.get("x")) for trace in figure.traces) / 2, one
            assert one["texts"] > 5
        assert await tab.value(OVERLAPS) == []
        worst = await tab.value(
            CONTRASTS.replace(COLOUR, f"(node.closest('svg') ? {COLOUR.replace('color', 'fill')} : {COLOUR})")
        )
        assert worst[0][0] >= 4.5, worst
        assert tab.troubles() == []
        assert asked_elsewhere(tab, url) == []


async def test_the_scheme_can_change_while_it_is_open(tmp_path: pathlib.Path) -> None:
    async with report(tmp_path, made_up_search(60)) as (_, tab, _):
        fill = "getComputedStyle(document.querySelector('#plot-rates .xtick text')).fill"
        before = await tab.value(fill)
        await tab.prefer("dark")
        await tab.until(f"{fill} !== '{before}'")
        assert tab.troubles() == []


@pytest.mark.parametrize(
    "made",
    [
        finished("run", [run_of([])]),
        finished("run", [run_of([failed(at, at / 10) for at in range(20)])]),
        finished("sweep", []),
    ],
    ids=["nothing was due", "all failed", "no run"],
)
async def test_a_run_without_answers_has_a_page(tmp_path: pathlib.Path, made: MadeUp) -> None:
    async with report(tmp_path, made) as (_, tab, url):
        assert "Left out" in await tab.value("document.body.innerText")
        assert tab.troubles() == []
        assert asked_elsewhere(tab, url) == []


async def test_foreign_words_run_nothing(tmp_path: pathlib.Path) -> None:
    runs = [made_up_run(f"{HOSTILE}{at}", requests=40, rate=rate) for at, rate in enumerate((2.0, 4.0))]
    for run in runs:
        run.settings = {"target": {"model": HOSTILE}}
        run.workload, run.ended = HOSTILE, HOSTILE
        run.point |= {"policy": HOSTILE}
        for record in run.records:
            if record.account:
                record.account |= {"prefill_agent": HOSTILE, "decode_agent": f"<a href='{HOSTILE}'>d</a>"}
    async with report(tmp_path, finished("search", runs, HOSTILE)) as (_, tab, url):
        assert await tab.value("document.title") == "kvxfer load test"
        assert await tab.value("document.querySelectorAll('img, iframe, object, .plot a[href]').length") == 0
        assert "onerror" in await tab.value("document.getElementById('verdicts').innerText")
        assert tab.troubles() == []
        assert asked_elsewhere(tab, url) == []


async def test_the_policy_holds(tmp_path: pathlib.Path) -> None:
    async with report(tmp_path, finished("run", [made_up_run(requests=20)])) as (_, tab, _):
        await tab.value(
            "(() => { const one = document.createElement('script'); one.textContent = 'window.ran = 1';"
            "document.body.append(one); })()"
        )
        assert await tab.value("typeof window.ran") == "undefined"
        went = "fetch('http://127.0.0.1:1/').then(() => 'went', () => 'did not')"
        assert await tab.value(went) == "did not"
        assert "Content Security Policy" in " ".join(trouble.get("text", "") for trouble in tab.troubles())
