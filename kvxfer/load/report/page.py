"""The page itself: its head in words and tables, its figures, and the policy that lets nothing leave it.

Decides the order and the wording. All that came from outside is escaped, and only the two scripts that the policy names
by their digests may run: a text that looks like a script is none.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import html
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from kvxfer.load.artefacts import StoredLoadTest
from kvxfer.load.report.figure import ReportFigure

FOLDER = pathlib.Path(__file__).parent
ROWS_MAX = 200
"""Runs in the table."""
VERDICTS_MAX = 20
"""Shown at once."""
OUTCOME = "attainment_missed"
"""The verdict that says what the page says of every run."""
KIND_NAMES = {
    "run": "one run",
    "search": "a search for the highest rate",
    "sweep": "a sweep",
    "import": "results of another tool",
    "unfinished": "cut off before its end",
}
SHOWN_SETTINGS = ("url", "model", "api", "trace", "seed", "salt", "warmup", "goodput", "attainment")
DIFFER = "url"
"""A sweep has another one at each point, which says nothing."""


def page_of(stored: StoredLoadTest, figures: Sequence[ReportFigure]) -> str:
    """The whole page as text."""
    plotly, script = get_plotlyjs().replace("\r\n", "\n"), (FOLDER / "page.js").read_text()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_digest(plotly)} {_digest(script)}",
            "style-src 'unsafe-inline'",
            "img-src data: blob:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    drawn = [figure.spec() for figure in figures if not figure.missing]
    specs = json.dumps(drawn, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        "<title>kvxfer load test</title>",
        f"<style>\n{(FOLDER / 'page.css').read_text()}</style>\n</head>\n<body>",
        _head(stored),
        *(_figure(figure) for figure in figures if not figure.missing),
        _left_out([figure for figure in figures if figure.missing]),
        _words(stored),
        f'<script type="application/json" id="specs">{specs}</script>',
        f"<script>{plotly}</script>",
        f"<script>{script}</script>",
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _text(value: object, most: int = 400) -> str:
    said = str(value)
    return html.escape(said if len(said) <= most else said[: most - 1] + "\u2026")


def _head(stored: StoredLoadTest) -> str:
    began = min((run.began_unix_s for run in stored.runs if run.began_unix_s), default=None)
    facts = {
        "what": KIND_NAMES.get(stored.kind, stored.kind),
        "when": "unknown" if began is None else _date(began),
        "workload": _joined(run.workload for run in stored.runs),
        "source": _joined(run.source for run in stored.runs),
        "sent by": _joined(run.driver for run in stored.runs),
        **_settings(stored),
    }
    rows = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in facts.items() if value
    )
    notes = "".join(f"<p>{_text(note)}</p>" for note in stored.notes)
    return (
        "<header><h1>kvxfer load test</h1></header>\n"
        f'<section id="head"><dl class="facts">{rows}</dl>{notes}</section>\n'
        f'<section id="verdicts"><h2>Verdicts</h2>{_verdicts(stored)}</section>\n' + _table(stored)
    )


def _settings(stored: StoredLoadTest) -> dict[str, Any]:
    """What all runs were told, of the settings that a reader asks for first."""
    told: dict[str, Any] = {}
    for name in SHOWN_SETTINGS:
        values = {str(value) for run in stored.runs if (value := _found(run.settings, name)) not in (None, "")}
        if values - ({"0"} if name != "seed" else set()) and not (name == DIFFER and len(values) > 1):
            told[name] = ", ".join(sorted(values)[:5])
    return told


def _found(settings: Mapping[str, Any], name: str) -> Any:
    """A setting by its name, in whatever group it stands."""
    if name in settings:
        return settings[name]
    groups = (group for group in settings.values() if isinstance(group, Mapping))
    return next((group[name] for group in groups if name in group), None)


def _verdicts(stored: StoredLoadTest) -> str:
    """Of the whole and what makes a run invalid first; of many runs the rest is folded, run by run."""
    whole = [one for one in stored.verdicts if not one.get("run")]
    invalid = [one for one in stored.verdicts if one.get("run") and one.get("is_failure")]
    rest = []
    for summary in stored.summaries:
        rest.append(_outcome(summary))
        mine = [one for one in stored.verdicts if one.get("run") == summary.get("name") and not one.get("is_failure")]
        rest += [_verdict(one) for one in mine if one.get("name") != OUTCOME]
    first = [_verdict(one) for one in (*whole, *invalid)]
    if len(first) + len(rest) <= VERDICTS_MAX:
        return _list(first + rest) or "<p>None was given.</p>"
    return f"{_list(first)}<details><summary>Run by run</summary>{_list(rest)}</details>"


def _list(verdicts: Iterable[tuple[bool | None, str]]) -> str:
    said = "".join(f'<li class="{_mark(is_good)}">{_text(text, 1000)}</li>' for is_good, text in verdicts if text)
    return f'<ul class="verdicts">{said}</ul>' if said else ""


def _outcome(summary: Mapping[str, Any]) -> tuple[bool | None, str]:
    """Whether a run met its target, and the sentence that says it; no sentence where nothing was due."""
    share = summary.get("attainment")
    if not isinstance(share, Mapping) or not summary.get("due"):
        return None, ""
    limits = summary.get("limits")
    what = f"met all limits ({limits}, in ms)" if limits else "were answered whole"
    return bool(summary.get("is_attained")), (
        f"{summary.get('name')}: {_percent(share.get('share'))} of {summary['due']:,} requests due {what}; "
        f"{_percent(summary.get('attainment_target'))} were asked for."
    )


def _verdict(verdict: Mapping[str, Any]) -> tuple[bool | None, str]:
    """(False where the run did not measure what it claims to, else None; its sentence)."""
    run, sentence = verdict.get("run"), str(verdict.get("sentence", ""))
    return False if verdict.get("is_failure") else None, f"{run}: {sentence}" if run else sentence


def _mark(is_good: bool | None) -> str:
    return "" if is_good is None else "good" if is_good else "bad"


def _joined(values: Iterable[str]) -> str:
    found = list(dict.fromkeys(value for value in values if value))
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")


def _date(unix_s: float) -> str:
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _table(stored: StoredLoadTest) -> str:
    """The summaries: what is asked for first of each run."""
    head = (
        *("run", "due", "failed", "offered /s", "goodput /s", "met all limits", "95 % interval"),
        *("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "E2E p50", "E2E p99", "output tokens/s"),
    )
    rows = []
    for run, summary in list(zip(stored.runs, stored.summaries, strict=True))[:ROWS_MAX]:
        share = summary.get("attainment") or {}
        failed = summary.get("failed")
        cells = [
            run.name,
            _count(summary.get("due")),
            _count(sum(failed.values()) if isinstance(failed, Mapping) else failed),
            _figures(summary.get("offered_per_s")),
            _figures(summary.get("goodput_per_s")),
            _percent(share.get("share")),
            f"{_percent(share.get('low'))} to {_percent(share.get('high'))}" if share else "",
            *(_time(_percentile(summary, name, which)) for name in ("ttft", "tpot", "e2e") for which in ("p50", "p99")),
            _figures(summary.get("output_tokens_per_s")),
        ]
        mark = "bad" if summary.get("is_attained") is False else ""
        rows.append(f'<tr class="{mark}">{"".join(f"<td>{_text(cell, 60)}</td>" for cell in cells)}</tr>')
    more = (
        f'<p class="quiet">{ROWS_MAX} of {len(stored.runs)} runs are listed.</p>' if len(stored.runs) > ROWS_MAX else ""
    )
    return (
        '<section id="summary"><h2>Summary</h2>'
        '<p class="quiet">Percentiles of all requests due: one that failed counts as never.</p>'
        '<div class="wide"><table><thead><tr>'
        + "".join(f"<th>{_text(name)}</th>" for name in head)
        + f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div>{more}</section>"
    )


def _percentile(summary: Mapping[str, Any], name: str, which: str) -> Any:
    values = summary.get("of_all")
    one = values.get(name) if isinstance(values, Mapping) else None
    return one.get(which) if isinstance(one, Mapping) else None


def _time(value: Any) -> str:
    if value == "inf":
        return "never"
    if not isinstance(value, (int, float)):
        return ""
    return f"{value * 1e3:.4g} ms" if value < 1 else f"{value:.4g} s"


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else ""


def _figures(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, (int, float)) and value < 10_000 else _count(_whole(value))


def _whole(value: Any) -> Any:
    return round(value) if isinstance(value, float) else value


def _percent(value: Any) -> str:
    return f"{100 * value:.1f} %" if isinstance(value, (int, float)) else ""


def _figure(figure: ReportFigure) -> str:
    notes = "".join(f'<p class="note">{_text(note)}</p>' for note in figure.notes)
    return (
        f'<figure id="figure-{figure.key}"><figcaption><h2>{_text(figure.title)}</h2><p>{_text(figure.sentence)}</p>'
        f'{notes}</figcaption><div class="plot" id="plot-{figure.key}" role="img" aria-label="{_text(figure.title)}" '
        f'style="height:{figure.height}px"></div></figure>'
    )


def _left_out(figures: Sequence[ReportFigure]) -> str:
    rows = "".join(
        f'<li id="missing-{figure.key}">{_text(figure.title)}: {_text(figure.missing)}.</li>' for figure in figures
    )
    return f'<section id="missing"><h2>Left out</h2><ul class="quiet">{rows}</ul></section>' if rows else ""


def _words(stored: StoredLoadTest) -> str:
    """Definitions and environment, folded."""
    parts = []
    for title, members in (("Definitions", "definitions"), ("The machine that sent", "environment")):
        values = stored.document.get(members, {})
        rows = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in values.items())
        if rows:
            parts.append(f"<details><summary>{title}</summary><dl>{rows}</dl></details>")
    return f"<section>{''.join(parts)}</section>" if parts else ""
