"""Makes docs/load-report.png and docs/load-report-sweep.png: parts of the reports of a search and a sweep.

usage: python -m tests.support.load_screenshot FOLDER [light|dark] [SEARCH SWEEP]

SEARCH and SWEEP are directories of load tests; without them both are made up.
"""

from __future__ import annotations

import asyncio
import base64
import pathlib
import sys
import tempfile

from kvxfer.load.artefacts import REPORT_FILE, RunDirectory
from kvxfer.load.report.write import write_report
from tests.support.browser import Browser, browsing
from tests.support.load_made_up import MadeUp, made_up_search, made_up_sweep

WIDTH = 1120
BYTES_MAX = 300_000
SHOWN = {
    "load-report.png": (made_up_search, "header", "figure-rates"),
    "load-report-sweep.png": (made_up_sweep, "figure-splits", "figure-pareto"),
}
"""By file: whose report, and the first and the last part of the page that are in the picture."""


def report_in(directory: str) -> str:
    """The address of a load test's report."""
    return pathlib.Path(directory, REPORT_FILE).resolve().as_uri()


def reported(made: MadeUp, path: pathlib.Path) -> str:
    """The same of a made-up load test, which is written into a new directory."""
    with RunDirectory.create(path) as directory:
        stored = directory.finish(made.kind, made.runs, made.summaries, made.verdicts, made.extra)
    return write_report(path, stored).as_uri()


async def photograph(browser: Browser, report: str, scheme: str, first: str, last: str) -> bytes:
    tab = await browser.open(report, scheme=scheme, width=WIDTH, height=900)
    await tab.until("document.documentElement.dataset.drawn !== undefined")
    of = "document.querySelector('{0}, #{0}').getBoundingClientRect()"
    top = await tab.value(f"Math.max(0, {of.format(first)}.top + scrollY - 10)")
    end = await tab.value(f"{of.format(last)}.bottom + scrollY + 10")
    clip = {"x": 0, "y": top, "width": WIDTH, "height": end - top, "scale": 1}
    answer = await tab.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    return base64.b64decode(answer["data"])


async def main(folder: pathlib.Path, scheme: str = "light", *directories: str) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        async with browsing(pathlib.Path(place, "profile")) as browser:
            for at, (name, (make, first, last)) in enumerate(SHOWN.items()):
                report = report_in(directories[at]) if directories else reported(make(), pathlib.Path(place, name))
                content = await photograph(browser, report, scheme, first, last)
                assert len(content) <= BYTES_MAX, (name, len(content))
                (folder / name).write_bytes(content)


if __name__ == "__main__":
    asyncio.run(main(pathlib.Path(sys.argv[1]), *sys.argv[2:]))
