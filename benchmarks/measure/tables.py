"""A report as text: the lines that are printed while it grows, and benchmarks/RESULTS.md.

It decides columns and rounding. It must never measure: what it writes is in the report, and nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from measure.bars import CHECKSUMS_BAR, bar, is_held
from measure.contenders import COPYING, show_size
from measure.report import Report
from measure.rows import Comparison, Row, Spread

LANE_TEXT = {
    "mapped": "the reader maps the source's memory and copies",
    "cma": "process_vm_readv out of memory that was not allocated for it",
    "stream": "TCP",
    "unix": "the code of `stream` over a Unix socket",
    "ucx": "UCX, over the transports that NIXL's default uses",
}


def line(row: Row) -> str:
    """One row for the terminal."""
    words = [f"{row.lane:7} {row.op:5} {row.pages:4} {row.lists:8} x{row.at_once:<2} {show_size(row.block_bytes):>5}"]
    if threads := how_many(row.lane, row.copy_threads):
        words[0] += f"  {threads}"
    if row.error:
        return f"{words[0]}  {row.error}"
    words.append(f"{row.gb_s.median:6.2f} GB/s {row.cpu_s_per_gb:5.2f} CPU s/GB")
    for other in row.others:
        if other.error:
            words.append(f"{other.name}: {other.error}")
            continue
        held = {True: " ok", False: " BELOW", None: ""}[is_held(row, other)]
        words.append(f"{other.ratio.median:.2f} of {other.name} {other.gb_s.median:.2f}{held}")
    return "  ".join(words)


def markdown(report: Report) -> str:
    """All of benchmarks/RESULTS.md."""
    parts = [_head(report)]
    for key, group in itertools.groupby(report.rows, _key):
        parts.append(_table(key, list(group), report))
    parts += [_directions(report), _stripes(report), _fairness(report.rows), _checksums(report)]
    parts += [_latency(report), _post_cost(report), _rest(report)]
    return "\n".join(part for part in parts if part) + "\n"


def _head(report: Report) -> str:
    m = report.machine
    return f"""# Results

Written by `benchmarks/transfer.py`, never by hand. How to read and repeat it: [docs](../docs/benchmarks.md).

- machine: {m["cpu"]}, {m["cores"]} cores, {m["memory_gib"]} GiB, Linux {m["kernel"]}, Python {m["python"]}
- commit {report.commit}, {report.date}; the run took {report.seconds:.0f} s, load before it {m["load_before"]:.1f}
- command: `{report.command}`
- random blocks of {report.pool_bytes >> 20} MiB pools, {report.nbytes >> 20} MiB a transfer, {report.pairs} pairs
  of {report.sets} sets of processes a row, if the table does not say otherwise

GB/s are medians, in brackets the quartiles. A ratio is the median of the pairs' ratios: kvxfer's speed over theirs.
CPU is seconds of processor time a GB, of the source and of the destination. Bold: below the bar.
"""


def how_many(lane: str, copy_threads: int) -> str:
    """Threads that copy; empty on lanes where nothing is copied so."""
    if lane not in COPYING:
        return ""
    if copy_threads == 0:
        return "a copying thread for each idle processor"
    return "one copying thread" if copy_threads == 1 else f"{copy_threads} copying threads"


def _key(row: Row) -> tuple[Any, ...]:
    return (row.site, row.lane, row.op, row.pages, row.lists, row.at_once, row.via, row.copy_threads)


def _table(key: tuple[Any, ...], rows: list[Row], report: Report) -> str:
    site, lane, op, pages, lists, at_once, via, copy_threads = key
    title = f"## `{lane}`, {op.upper()}, {pages} pages"
    more = [
        site if site != "one host" else "",
        "one-shot" if lists != "prepared" else "",
        f"{at_once} transfers at once" if at_once > 1 else "",
        "by pull under a grant" if via == "pull" else "",
        how_many(lane, copy_threads),
    ]
    title += "".join(f", {words}" for words in more if words)
    names = list(dict.fromkeys(other.name for row in rows for other in row.others))
    header = ["block", "kvxfer", "CPU"]
    for name in names:
        header += [name, "ratio", "bar", "CPU"]
    table = [header]
    notes: dict[str, list[str]] = {}
    for row in rows:
        if row.error:
            table.append([show_size(row.block_bytes), f"failed: {row.error}", *[""] * (len(header) - 2)])
            continue
        cells = [show_size(row.block_bytes), _speed(row.gb_s), _cpu(row)]
        by_name = {other.name: other for other in row.others}
        for name in names:
            cells += _cells(row, by_name.get(name))
            settings = by_name[name].settings if name in by_name else ""
            if settings:
                notes.setdefault(f"{name}, {settings}", []).append(show_size(row.block_bytes))
        table.append(cells)
    chosen = "; ".join(f"{settings}: {', '.join(sizes)}" for settings, sizes in notes.items())
    errors = dict.fromkeys(f"{o.name} did not run: {o.error}" for row in rows for o in row.others if o.error)
    about = f"{LANE_TEXT[lane]}."
    most = max((other.pairs for row in rows for other in row.others), default=0)
    if most > report.pairs:
        about += f" {most} pairs a row, of {report.sets * most // report.pairs} sets of processes."
    text = [title, "", about, "", _rows_of(table)]
    if chosen:
        text += ["", f"Fastest settings, by size of blocks: {chosen}."]
    text += [f"\n{error}." for error in errors]
    return "\n".join(text) + "\n"


def _cells(row: Row, other: Comparison | None) -> list[str]:
    if other is None or other.error:
        return ["", "", "", ""]
    least = bar(row, other)
    ratio = f"{other.ratio.median:.2f} ({other.ratio.low:.2f} to {other.ratio.high:.2f})"
    if is_held(row, other) is False:
        ratio = f"**{ratio}**"
    return [_speed(other.gb_s), ratio, "" if least is None else f"{least:g}", _cpu(other)]


def _cpu(of: Row | Comparison) -> str:
    """Source and destination; of an old report, both together."""
    source = of.source_cpu_s_per_gb
    return f"{source:.2f} + {of.cpu_s_per_gb - source:.2f}" if source else f"{of.cpu_s_per_gb:.2f}"


def _speed(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"


def _rows_of(table: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in table]
    lines.insert(1, "|" + "---|" * len(table[0]))
    return "\n".join(lines)


def _directions(report: Report) -> str:
    if not report.directions:
        return ""
    table = [["where", "block", "READ GB/s", "WRITE GB/s", "WRITE / READ (bar 0.9 to 1.1)"]]
    for entry in report.directions:
        case = [entry["site"], show_size(entry["block_bytes"])]
        if "error" in entry:
            table.append([*case, f"did not run: {entry['error']}", "", ""])
            continue
        read, write, ratio = (Spread(**entry[name]) for name in ("read", "write", "ratio"))
        shown = f"{ratio.median:.2f}" if 0.9 <= ratio.median <= 1.1 else f"**{ratio.median:.2f}**"
        table.append([*case, _speed(read), _speed(write), f"{shown} ({ratio.low:.2f} to {ratio.high:.2f})"])
    text = "The same blocks in turns between the same two processes, huge pages; the ratio is the median of the pairs'."
    return f"## `stream`: both directions\n\n{text}\n\n{_rows_of(table)}\n"


def _stripes(report: Report) -> str:
    if not report.stripes:
        return ""
    table = [["where", "block", "1 connection GB/s", "2", "4", "2 / 1", "4 / 1"]]
    for entry in report.stripes:
        case = [entry["site"], show_size(entry["block_bytes"])]
        if "error" in entry:
            table.append([*case, f"did not run: {entry['error']}", *[""] * 4])
            continue
        speeds = [_speed(Spread(**entry["gb_s"][stripes])) for stripes in ("1", "2", "4")]
        ratios = [Spread(**entry["ratio"][stripes]) for stripes in ("2", "4")]
        table.append([*case, *speeds, *(f"{r.median:.2f} ({r.low:.2f} to {r.high:.2f})" for r in ratios)])
    text = "READ, huge pages, the same blocks in turns; the ratio is the median of the pairs'."
    return f"## `stream`: several connections\n\n{text}\n\n{_rows_of(table)}\n"


def _fairness(rows: Iterable[Row]) -> str:
    many = [row for row in rows if row.at_once > 1 and not row.error]
    if not many:
        return ""
    table = [["lane", "transfers at once", "block", "slowest / median", "bar"]]
    for row in many:
        least = "1.3" if row.at_once == 64 else ""
        shown = f"{row.slowest_to_median:.2f}"
        shown = f"**{shown}**" if least and row.slowest_to_median > 1.3 else shown
        table.append([f"`{row.lane}`", str(row.at_once), show_size(row.block_bytes), shown, least])
    return "## Fairness\n\nTime from the first post to each transfer's own end.\n\n" + _rows_of(table) + "\n"


def _checksums(report: Report) -> str:
    if not report.checksums:
        return ""
    head = [
        "where",
        "direction",
        "block",
        "off GB/s",
        "on GB/s",
        f"costs (bar {CHECKSUMS_BAR:.0%})",
        "cpu s/GB off",
        "on",
    ]
    table = [head]
    for entry in report.checksums:
        case = [entry["site"], entry["op"], show_size(entry["block_bytes"])]
        if "error" in entry:
            table.append([*case, f"did not run: {entry['error']}", "", "", "", ""])
            continue
        cost, cpu = entry["cost"], entry["cpu_s_per_gb"]
        shown = f"{cost['median']:.1%}"
        if cost["median"] >= CHECKSUMS_BAR:
            shown = f"**{shown}**"
        shown += f" ({cost['low']:.1%} to {cost['high']:.1%})"
        table.append(
            [*case, f"{entry['off']:.2f}", f"{entry['on']:.2f}", shown, f"{cpu['off']:.2f}", f"{cpu['on']:.2f}"]
        )
    text = (
        "`stream` with a CRC-32C of every block, and without, in turns: of the two medians, in brackets the quartiles"
    )
    text += " of the pairs. Both ends, and the network between them, share the processors of one machine."
    return f"## What checksums cost\n\n{text}\n\n{_rows_of(table)}\n"


def _latency(report: Report) -> str:
    if not report.latency:
        return ""
    names = ("socket, poll", "poll", "socket, sleep", "wait", "await", "wake", "notification")
    bars = ("poll / socket (bar 2)", "(await - poll) / wake (bar 1)", "notification / socket (bar 1.5)")
    table = [["contender", *names, *bars]]
    for entry in report.latency:
        if "error" in entry:
            table.append([entry["contender"], f"did not run: {entry['error']}", *[""] * 9])
            continue
        cells = [entry["contender"], *(_times(entry.get(name)) for name in names)]
        if "socket, poll" in entry:
            p50 = {name: spread["p50_us"] for name, spread in entry.items() if isinstance(spread, dict)}
            cells.append(_at_most(p50["poll"] / p50["socket, poll"], 2.0))
            cells.append(_at_most((p50["await"] - p50["poll"]) / p50["wake"], 1.0))
            cells.append(_at_most(p50["notification"] / p50["socket, poll"], 1.5))
        else:
            cells += [""] * len(bars)
        table.append(cells)
    text = (
        "One 4K block, prepared, post to completion, in µs: p50 / p99. `poll`: the state is looked at without a "
        "pause; `wait`: `TransferBatch.wait`; `await`: by an event loop. `socket`: the round trip of a bare socket in "
        "turns with them, by an end that polls and by one that sleeps: one byte there, back a block where the lane's "
        "own socket carries it, else 64 bytes; the answering end sleeps. `mapped` and `cma` go there twice: they "
        "ask, read, and have it confirmed. `wake`: the bare event loop, from another thread's write to an eventfd "
        "until the coroutine goes on. A notification: until it was acknowledged."
    )
    return f"## Latency\n\n{text}\n\n{_rows_of(table)}\n"


def _at_most(ratio: float, most: float) -> str:
    return f"{ratio:.2f}" if ratio <= most else f"**{ratio:.2f}**"


def _times(found: dict[str, float] | None) -> str:
    return "" if found is None else f"{found['p50_us']:.0f} / {found['p99_us']:.0f}"


def _post_cost(report: Report) -> str:
    if not report.post_cost:
        return ""
    table = [
        ["contender", "100,000 scattered blocks, plan and post (bar 10 ms)", "10,000 prepared, again (bar 0.3 ms)"]
    ]
    for entry in report.post_cost:
        if "error" in entry:
            table.append([entry["contender"], f"did not run: {entry['error']}", ""])
            continue
        cells = [entry["contender"]]
        for name, most in (("plan_post", 10.0), ("again", 0.3)):
            took = entry[name]["p50_us"] / 1e3
            is_over = took > most and entry["contender"].startswith("kvxfer")
            cells.append(f"**{took:.2f} ms**" if is_over else f"{took:.2f} ms")
        table.append(cells)
    text = "Python call to return, 4K blocks, medians. What a peer moves before its call returns is in its figure."
    if any(entry["contender"].startswith("Mooncake") for entry in report.post_cost):
        text += " Mooncake has no prepared lists: its call that does not wait, with the same lists of integers again."
    return f"## What posting costs\n\n{text}\n\n{_rows_of(table)}\n"


def _rest(report: Report) -> str:
    parts = []
    if report.held_gil:
        table = [["contender", "speed with the source's GIL held / without (bar 0.95)", "each turn"]]
        for entry in report.held_gil:
            ratio = entry["ratio"]
            shown = f"{ratio:.2f}" if ratio >= 0.95 else f"**{ratio:.2f}**"
            table.append([entry["contender"], shown, " ".join(f"{one:.2f}" for one in entry["ratios"])])
        why = "By a C call that sleeps without releasing it."
        parts.append(f"## The source's GIL held\n\n{why}\n\n{_rows_of(table)}\n")
    if report.idle_peers:
        found = report.idle_peers
        table = [["process", "CPU before", f"CPU with {found['sessions']} idle sessions"]]
        names = {"source": "the one they are connected to", "destination": f"the {found['peers']} of them"}
        for name, text in names.items():
            table.append([text, f"{found['cpu_before'][name]:.3%}", f"{found['cpu'][name]:.3%}"])
        watched = f"Processor time over {found['watched_s']:g} s, of one core."
        parts.append(f"## Idle peers\n\n{watched}\n\n" + _rows_of(table) + "\n")
    if report.left_out:
        parts.append("## Not measured\n\n" + "\n".join(f"- {reason}" for reason in report.left_out) + "\n")
    return "\n".join(parts)
