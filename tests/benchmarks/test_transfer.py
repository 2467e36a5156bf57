"""benchmarks/transfer.py: that it notices a wrong byte, judges by the bars it shows, and runs."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.checkout

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's own packages."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("measure.bars", "measure.report", "measure.tables", "peers.memory"):
        importlib.import_module(name)
    yield sys.modules
    for name in [name for name in sys.modules if name.split(".")[0] in ("measure", "peers")]:
        del sys.modules[name]


def test_a_pool_that_missed_one_byte_is_not_right(parts: Any) -> None:
    memory = parts["peers.memory"]
    held = os.memfd_create("reference")
    os.write(held, np.random.default_rng(3).bytes(1 << 20))
    pool = memory.Pool(memory.anonymous(1 << 20, memory.Pages.SMALL), held)
    source, destination = memory.choose_pair(5, 256, 100)
    assert len(set(source.tolist())) == len(set(destination.tolist())) == 100
    pool.poison(4096, source, destination)
    assert not pool.is_right(4096, source, destination)
    for there, here in zip(source, destination, strict=True):
        pool.memory[here * 4096 : (here + 1) * 4096] = pool.reference[there * 4096 : (there + 1) * 4096]
    assert pool.is_right(4096, source, destination)
    pool.memory[int(destination[63]) * 4096 + 4095] ^= 1
    assert not pool.is_right(4096, source, destination)


def row_of(parts: Any, lane: str, ratios: dict[str, float]) -> Any:
    rows = parts["measure.rows"]
    speed = rows.Spread(1.0, 2.0, 3.0)
    others = tuple(
        rows.Comparison(name, "default", speed, 0.5, rows.Spread(ratio, ratio, ratio), 9)
        for name, ratio in ratios.items()
    )
    row = rows.Row(lane, "read", "4k", "prepared", 1, "one host", "post", 4096, 1 << 26, speed, 0.3, 1.1, others)
    return dataclasses.replace(row, copy_threads=1 if lane in ("mapped", "cma") else 0)


def test_scattered_pages_are_held_within_bounds_and_given_back(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = parts["peers.memory"]
    monkeypatch.setattr(memory.Scraps, "STEP_BYTES", 4 << 20)
    monkeypatch.setattr(memory, "available", lambda: 8 * (20 << 20))
    for share, steps in ((0.5, 5), (1.0, 1)):
        monkeypatch.setattr(memory, "together", lambda array, share=share: share)
        scraps = memory.Scraps()
        for _ in range(2):
            scraps.hold()
            assert [held.nbytes for held in scraps.held] == [4 << 20] * steps
        scraps.give_back()
        assert scraps.held == []


def test_how_pages_lie_is_a_share(parts: Any) -> None:
    memory, present = parts["peers.memory"], 1 << 63
    frames = [7, 8, 9, 4, 5, 70]
    assert memory.neighbouring(np.array([present | frame for frame in frames], np.uint64)) == 3 / 5
    assert memory.neighbouring(np.full(9, present, np.uint64)) == 0.0  # as a user that may not see them is shown them
    assert 0.0 <= memory.together(memory.anonymous(4 << 20, "4k")) <= 1.0
    assert 0 < memory.available() < 1 << 50


def test_a_multiple_of_a_peer_counts_as_kept_at_the_limit_of_the_socket(parts: Any) -> None:
    is_held = parts["measure.bars"].is_held
    at_limit = row_of(parts, "stream", {"plain TCP": 0.95, "NIXL tcp": 3.0, "Mooncake tcp": 9.0})
    assert [is_held(at_limit, other) for other in at_limit.others] == [True, True, True]
    below = row_of(parts, "stream", {"plain TCP": 0.85, "NIXL tcp": 3.0, "Mooncake tcp": 9.0})
    assert [is_held(below, other) for other in below.others] == [False, False, True]
    cma = row_of(parts, "cma", {"process_vm_readv": 0.95, "NIXL": 3.9})
    assert [is_held(cma, other) for other in cma.others] == [True, False]
    mapped = row_of(parts, "mapped", {"memcpy": 0.8, "NIXL": 5.0})
    assert [is_held(mapped, other) for other in mapped.others] == [False, False]
    by_default = [dataclasses.replace(row, copy_threads=0) for row in (cma, mapped)]
    assert [is_held(row, other) for row in by_default for other in row.others] == [None, False, None, None]
    many = dataclasses.replace(cma, at_once=64)
    assert is_held(many, many.others[1]) is None


def test_a_report_says_the_same_after_it_was_written_and_read(parts: Any, tmp_path: pathlib.Path) -> None:
    report, tables = parts["measure.report"], parts["measure.tables"]
    machine = {"cpu": "x", "cores": 2, "memory_gib": 1, "kernel": "6", "python": "3", "load_before": 0.1}
    made = report.Report(machine, "command", "abc", "2026-01-01", 9, 1 << 28, 1 << 26)
    made.rows = [row_of(parts, "cma", {"process_vm_readv": 0.95, "NIXL": 3.9})]
    made.left_out = ["`ucx`: no library"]
    made.write(tmp_path / "figures.json")
    text = tables.markdown(report.Report.read(tmp_path / "figures.json"))
    assert text == tables.markdown(made)
    assert "**3.90 (3.90 to 3.90)**" in text
    assert "no library" in text


def test_a_table_of_more_pairs_than_the_run_says_so(parts: Any) -> None:
    report, tables = parts["measure.report"], parts["measure.tables"]
    machine = {"cpu": "x", "cores": 2, "memory_gib": 1, "kernel": "6", "python": "3", "load_before": 0.1}
    usual = row_of(parts, "cma", {"NIXL": 5.0})
    more = row_of(parts, "ucx", {"NIXL": 1.0})
    more = dataclasses.replace(more, others=[dataclasses.replace(one, pairs=18) for one in more.others])
    made = report.Report(machine, "command", "abc", "2026-01-01", 9, 1 << 28, 1 << 26, sets=3)
    made.rows = [usual, more]
    text = tables.markdown(made)
    assert text.count("pairs a row") == 1
    assert "18 pairs a row, of 6 sets of processes." in text[text.index("## `ucx`") :]


def test_rows_of_more_copying_threads_are_a_table_of_their_own(parts: Any) -> None:
    row = row_of(parts, "cma", {"NIXL": 3.9})
    more = dataclasses.replace(row_of(parts, "cma", {"NIXL": 6.1}), copy_threads=2)
    made = parts["measure.report"].Report(parts["measure.report"].machine(), "c", "0", "d", 9, 1 << 29, 1 << 28)
    made.rows = [row, more]
    text = parts["measure.tables"].markdown(made)
    assert "## `cma`, READ, 4k pages, one copying thread" in text
    assert text.index("**3.90") < text.index("## `cma`, READ, 4k pages, 2 copying threads") < text.index(" 6.10 (")
    made.rows = [dataclasses.replace(more, copy_threads=0)]
    text = parts["measure.tables"].markdown(made)
    assert "## `cma`, READ, 4k pages, a copying thread for each idle processor" in text


def test_another_machines_table_touches_nothing_else(tmp_path: pathlib.Path) -> None:
    """README's figures come from RESULTS.md, its picture from the same figures."""
    kept = [
        BENCHMARKS / "RESULTS.md",
        BENCHMARKS / "results.json",
        BENCHMARKS.parent / "docs/benchmarks/throughput.png",
    ]
    before = [path.read_bytes() for path in kept]
    (tmp_path / "other.json").write_bytes(before[1])
    command = [sys.executable, str(BENCHMARKS / "transfer.py"), "--rewrite", f"--results={tmp_path / 'other.md'}"]
    subprocess.run(command, check=True, timeout=60)
    assert [path.read_bytes() for path in kept] == before
    assert (tmp_path / "other.md").read_text().startswith("# Results\n")


@pytest.mark.parametrize(("pairs", "sets"), [(9, 3), (10, 3), (2, 3), (1, 3), (9, 1), (9, 0)])
def test_every_round_is_in_one_part(parts: Any, pairs: int, sets: int) -> None:
    found = parts["measure.rows"].parts_of(pairs, sets)
    assert [number for part in found for number in part] == list(range(pairs))
    assert len(found) == max(1, min(pairs, sets))
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_it_runs_against_the_limits(tmp_path: pathlib.Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / "transfer.py"), "--pairs=2", "--bytes=1m", "--pool=8m", "--sizes=16k"]
    command += ["--lanes=mapped,cma,stream,unix", "--against=limits", "--direction=read,write", "--sets=2"]
    command += ["--latency", "--small-lanes=stream", f"--json={figures}"]
    subprocess.run(command, check=True, timeout=120)
    found = json.loads(figures.read_text())
    assert [row["error"] for row in found["rows"]] == [""] * 8
    assert [(entry["contender"], entry["poll"]["p50_us"] > 0) for entry in found["latency"]] == [
        ("kvxfer stream", True)
    ]
    others = [row["others"][0] for row in found["rows"] if row["others"]]
    assert [(other["error"], other["pairs"]) for other in others] == [("", 2)] * 6
