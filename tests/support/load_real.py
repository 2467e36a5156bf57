"""``kvxfer load run`` as a user calls it, against engines that really compute, and what must be true of its artefacts
there. Knows no engine, and nothing of how one is started.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from kvxfer.load.artefacts import REQUESTS_FILE, RUN_FILE
from kvxfer.load.join import PHASES, RequestPhases, phases_of
from kvxfer.load.offered import with_warmup, workload_from
from kvxfer.load.options import WorkloadOptions
from kvxfer.load.record import MeasuredRequest
from kvxfer.workload.request import WorkloadRequest
from tests.support.child import environment

OFFERED = WorkloadOptions(rate=1.0, requests=40, prompt_tokens=300, output_tokens=12, length_spread=0.5)
WARMUP = 2
LIMITS = "ttft:60000 e2e:110000"
"""ms: no whole answer misses them, however busy the machine is."""
RUN_S = 240.0
SAID = '{"logit_bias":{"67":100}}'
"""So that each token is one with text. What random weights choose is often a part of a character, or a token that the
tokenizer does not have."""
OF_A_BUSY_MACHINE = {"generator_late", "undelivered"}


@dataclasses.dataclass
class LoadOnEngines:
    """What one command said and left."""

    said: str
    run: dict[str, Any]
    """``run.json``."""
    records: list[MeasuredRequest]
    """Of the window, by number."""
    report: str

    @property
    def summary(self) -> dict[str, Any]:
        [run] = self.run["runs"]
        return dict(run["summary"])

    @property
    def phases(self) -> list[RequestPhases]:
        return [known for record in self.records if (known := phases_of(record)) is not None]

    @property
    def remote(self) -> int:
        """Whose prompts P computed. On a machine without time for all, the router takes a silent P out for a while."""
        return sum((record.account or {}).get("reason") == "remote" for record in self.records)

    def figures(self) -> str:
        """For a person who runs the test."""
        joined, told = self.summary["joined"], self.summary["phases"]
        times = ", ".join(
            f"{name} {1e3 * told[name]['p50']:.2f} / {1e3 * told[name]['p99']:.2f}" for name in PHASES if name in told
        )
        return (
            f"joined {joined['good']} of {joined['total']}, {self.remote} by P; p50 / p99 in ms: {times or 'no phases'}"
        )


def load_on(url: str, out: pathlib.Path, *more: str) -> LoadOnEngines:
    """Send OFFERED there. Its code says no more than that this machine was too busy to send in time."""
    command = [sys.executable, "-m", "kvxfer.cli", "load", "run", f"--url={url}", f"--out={out}", f"--warmup={WARMUP}"]
    command += [
        f"--{name.replace('_', '-')}={value}" for name, value in dataclasses.asdict(OFFERED).items() if _is_told(name)
    ]
    command += [f"--goodput={LIMITS}", f"--extra-body={SAID}", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, env=environment(), check=False)
    assert "Traceback" not in done.stderr, done.stderr
    run = json.loads((out / RUN_FILE).read_text())
    failures = {one["name"] for one in run["verdicts"] if one["is_failure"]}
    assert failures <= OF_A_BUSY_MACHINE, done.stdout
    assert done.returncode == (1 if failures else 0), done.stderr
    records = [record for record in _records(out / REQUESTS_FILE) if not record.is_warmup]
    return LoadOnEngines(done.stdout, run, records, (out / "report.html").read_text())


def _is_told(name: str) -> bool:
    return getattr(OFFERED, name) != getattr(WorkloadOptions(), name)


def _records(path: pathlib.Path) -> Sequence[MeasuredRequest]:
    lines = path.read_text().splitlines()
    return sorted(map(MeasuredRequest.from_json, lines), key=lambda record: record.number)


def asked() -> list[WorkloadRequest]:
    """What was to be sent, warm-up left out."""
    workload, _ = with_warmup(workload_from(OFFERED), WARMUP, OFFERED.rate)
    return list(workload.requests[WARMUP:])


def check_answers(load: LoadOnEngines) -> None:
    """All whole and good; their tokens are as many as were asked for, by the engine's own count."""
    assert [record.message for record in load.records if not record.is_good] == []
    assert len(load.records) == load.summary["due"] == load.summary["good"] == OFFERED.requests
    assert load.summary["is_attained"]
    assert f"{OFFERED.requests} good, 0 failed" in load.said
    for record, wanted in zip(load.records, asked(), strict=True):
        assert record.number == wanted.number
        assert record.tokens_from == "usage"
        assert (record.prompt_tokens, record.output_tokens) == (wanted.prompt_tokens, wanted.output_tokens)
        assert record.sent_s is not None
        assert record.first_s is not None
        assert record.last_s is not None
        assert record.sent_s < record.first_s <= record.last_s
    assert any(record.tpot_s for record in load.records)


def check_joined(load: LoadOnEngines, *, prefill: str, decode: str) -> None:
    """Each request has its phases: which worker did what, and where its time went."""
    assert len(load.phases) == load.summary["joined"]["good"] == load.summary["joined"]["total"] == OFFERED.requests
    for record, phases in zip(load.records, load.phases, strict=True):
        assert record.account is not None
        assert record.account["request_id"] == record.request_id
        assert phases.decode_worker == decode
        if record.account["reason"] == "remote":
            assert phases.prefill_worker == prefill
            check_order(record)
        assert all(getattr(phases, f"{name}_s") >= 0 for name in PHASES)
        assert abs(phases.total_s - record.e2e_s) < 1e-6
        assert phases.prefill_s > 0
    assert load.remote > OFFERED.requests / 2
    assert set(load.summary["phases"]) == set(PHASES)
    assert f"of {OFFERED.requests} of {OFFERED.requests} whole answers" in load.said
    assert "unexplained" in load.said
    assert f"Phases are known of {OFFERED.requests} of {OFFERED.requests} whole answers. Unexplained:" in load.report


def check_order(record: MeasuredRequest) -> None:
    """What cannot be otherwise, on however busy a machine: the router had a request after it was due, and had ended its
    answer before the client had all of it. A decode worker that was too slow is replaced, and the next one gets the
    prompt that P had computed before this one was chosen."""
    account = record.account
    assert account is not None
    assert record.end_s is not None
    assert 0 <= account["placed_s"] <= account["decode_sent_s"] <= account["first_s"] <= account["ended_s"]
    assert 0 <= account["prefill_sent_s"] <= account["prefill_ended_s"] <= account["ended_s"]
    assert account["ended_s"] <= record.end_s - record.due_s
    if account["attempts"] == 1:
        assert account["placed_s"] <= account["prefill_sent_s"]


def check_not_joined(load: LoadOnEngines) -> None:
    """No account came, and all that the command leaves says so."""
    assert [record.account for record in load.records] == [None] * OFFERED.requests
    assert (load.summary["joined"]["good"], load.summary["joined"]["total"]) == (0, OFFERED.requests)
    assert load.summary["phases"] == {}
    assert f"known of none of {OFFERED.requests} whole answers" in load.said
    assert "no answer carried a router" in load.report
