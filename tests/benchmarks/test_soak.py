"""benchmarks/soak.py: that its plan is its seed's, that its judge sees each wrong thing, and that it runs."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import subprocess
import sys
import time
import xml.etree.ElementTree
from typing import Any

import pytest

pytestmark = pytest.mark.checkout

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "soak.py"
ASKED = 480
"""Of a run that went well: four a second."""
MODULES = ("box", "cluster", "judge", "picture", "plan", "records")


@pytest.fixture(scope="module")
def parts() -> Any:
    """The benchmark's own modules, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        yield {name: importlib.import_module(f"soaking.{name}") for name in MODULES}
    for name in [name for name in sys.modules if name.split(".")[0] == "soaking"]:
        del sys.modules[name]


# --- plan ---


def planned(parts: Any, seed: int = 1, span_s: float = 3600.0, **more: Any) -> list[Any]:
    return list(parts["plan"].plan(seed, span_s, parts["cluster"].ROLES, **more))


def test_the_same_seed_gives_the_same_plan_and_another_one_another(parts: Any) -> None:
    assert planned(parts) == planned(parts)
    assert planned(parts) != planned(parts, seed=2)


def test_a_plan_has_a_fault_every_ten_seconds_and_each_is_over_before_the_next(parts: Any) -> None:
    faults = planned(parts)
    assert [fault.at_s for fault in faults] == [10.0 * number for number in range(1, 360)]
    assert all(0 < fault.length_s < 10 for fault in faults)


def test_a_plan_has_each_kind_as_often_as_any_other_and_befalls_every_part(parts: Any) -> None:
    faults = planned(parts)
    kinds = collections.Counter(fault.kind for fault in faults)
    assert set(kinds) == set(parts["plan"].BEFALLS)
    assert max(kinds.values()) - min(kinds.values()) <= 1
    roles = parts["cluster"].ROLES
    for kind, befallen in parts["plan"].BEFALLS.items():
        victims = {fault.victim for fault in faults if fault.kind == kind}
        spared = parts["plan"].SPARED if kind in ("kill", "restart") else ()
        assert victims == {name for name, role in roles.items() if role in befallen and name not in spared}, kind


def test_a_plan_ends_no_process_of_one_of_each_role(parts: Any) -> None:
    roles = parts["cluster"].ROLES
    assert sorted(roles[name] for name in parts["plan"].SPARED) == sorted(parts["judge"].ROLES)
    for seed in range(20):
        ended = {fault.victim for fault in planned(parts, seed, kinds=("kill", "restart"))}
        assert not ended & set(parts["plan"].SPARED)
        assert {roles[name] for name in ended} == set(roles.values())


def test_a_plan_parts_two_parts_that_need_each_other(parts: Any) -> None:
    roles, apart = parts["cluster"].ROLES, [fault for fault in planned(parts) if fault.kind == "apart"]
    assert apart
    assert all(roles[fault.peer] in parts["plan"].PEERS[roles[fault.victim]] for fault in apart)


def test_a_plan_of_some_kinds_has_no_other(parts: Any) -> None:
    assert {fault.kind for fault in planned(parts, kinds=("kill", "clock"))} == {"kill", "clock"}


def test_a_plan_is_printed_without_a_box() -> None:
    done = soaked("--plan", "--minutes", "1")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 5
    assert soaked("--plan", "--kinds", "flood").stderr == (
        "soak: --kinds: there is no fault flood; there are kill, stop, restart, partition, apart, disk, clock, rate, "
        "delay, loss\n"
    )


# --- judge ---


class Run:
    """A run without a fault in it that is not met; tests change it."""

    def __init__(self, parts: Any) -> None:
        self._records, self._judge = parts["records"], parts["judge"]
        self.asked = [self.request(number, number / 4) for number in range(ASKED)]
        self.faults = [self.fault("kill", "router-1")]
        self.processes = [self.process(), self.process("prefill", part="p1"), self.process("decode", part="d1")]
        self.processes.append(self.process("decode", part="d2"))
        self.blocks = [(at, part, int(at) % 5) for at in map(float, range(600)) for part in ("p1", "d1", "d2")]
        self.endings: list[dict[str, Any]] = []
        self.held: dict[str, Any] = {}
        self.late = [(3.0, 0.4)]
        self.span_s = 120.0
        self.kinds: tuple[str, ...] = ("kill",)
        self.planned = 1
        self.left_out: dict[str, str] = {}
        self.whole_s: float | None = 0.1

    def fault(self, kind: str, victim: str, peer: str = "") -> Any:
        """From 50 s to 53 s, and all was whole again 1 s later."""
        return self._records.HappenedFault(kind, victim, peer, 0.0, 50.0, 53.0, 1.0)

    def request(self, number: int, at_s: float, *attempts: Any, outcome: str = "right", **more: Any) -> Any:
        tries = [*attempts] or [self._records.Attempt(at_s, "router-1", ended_s=at_s + 0.1)]
        return self._records.Asked(number, 0, at_s, True, tries, outcome, 0.1, 0.2, "remote", "remote", **more)

    def fail(self, at_s: float, name: str, router: str = "router-1", outcome: str = "right", **more: Any) -> None:
        """One more request, whose first attempt fails."""
        attempt = self._records.Attempt(at_s, router, name, ended_s=at_s + 0.5, **more)
        self.asked.append(self.request(len(self.asked), at_s, attempt, outcome=outcome))

    def cut(self, at_s: float, name: str = "peer_gone", router: str = "router-2", **more: Any) -> None:
        """One more request, whose answer had begun and ends so."""
        self.fail(at_s, name, router, "cut", had_byte=True, had_token=True, **more)

    def process(self, role: str = "router", seconds: int = 600, part: str = "router-2", **grows: float) -> Any:
        """``grows``: by how much a second, from its start on."""
        at_s = [float(second) for second in range(seconds)]
        samples = self._records.Samples(part, role, 7, at_s)
        samples.memory_mb = [100.0 + grows.get("memory_mb", 0.0) * at for at in at_s]
        samples.descriptors = [int(20 + grows.get("descriptors", 0.0) * at) for at in at_s]
        samples.shared_mb = [2.0 + grows.get("shared_mb", 0.0) * at for at in at_s]
        samples.threads = [int(9 + grows.get("threads", 0.0) * at) for at in at_s]
        return samples

    def soaked(self) -> Any:
        ends = (self.endings, self.held, self.late, self.blocks)
        plan = (self.kinds, self.planned, self.left_out, self.whole_s)
        return self._judge.Soaked(self.span_s, self.asked, self.faults, self.processes, *ends, *plan)

    def unmet(self) -> dict[str, str]:
        return {verdict.rule: verdict.sentence for verdict in self._judge.judge(self.soaked()) if not verdict.is_met}


@pytest.fixture
def run(parts: Any) -> Run:
    return Run(parts)


def test_a_run_in_which_all_went_well_is_met(run: Run) -> None:
    assert run.unmet() == {}


def test_a_wrong_token(run: Run) -> None:
    run.asked.append(run.request(7, 4.0, outcome="wrong", wrong="[1, 3] is not [1, 2]"))
    assert run.unmet() == {"tokens": "request 7 at 4.0 s: [1, 3] is not [1, 2]"}


def test_a_client_that_finds_its_router_killed_asks_the_other_one(run: Run) -> None:
    run.fail(51.0, "connect_refused")
    assert run.unmet() == {}


def test_an_error_before_the_first_byte_by_a_router_that_is_there(run: Run) -> None:
    run.fail(51.0, "502:peer_gone", router="router-2")
    assert run.unmet() == {"avoidable": f"request {ASKED} at 51.0 s by router-2: 502:peer_gone"}


def test_an_error_after_the_first_byte_and_before_the_first_token(run: Run) -> None:
    run.faults = [run.fault("kill", "d1")]
    run.fail(51.0, "peer_gone", router="router-2", outcome="cut", had_byte=True)
    assert run.unmet() == {"avoidable": f"request {ASKED} at 51.0 s by router-2: peer_gone"}


CAN_CUT = [
    ("kill", "d1", ""), ("stop", "d1", ""), ("restart", "d1", ""), ("partition", "d1", ""), ("apart", "d1", "router-2"),
    ("kill", "router-2", ""), ("stop", "router-2", ""),
]  # fmt: skip
CANNOT_CUT = [
    ("kill", "p1", ""), ("kill", "d2", ""), ("kill", "router-1", ""), ("kill", "coordinator-1", ""),
    ("stop", "etcd-1", ""), ("apart", "p1", "d1"), ("apart", "d1", "coordinator-1"), ("apart", "d1", "router-1"),
    ("apart", "d2", "router-2"), ("apart", "p1", "router-2"), ("disk", "d1", ""), ("clock", "d1", ""),
    ("delay", "d1", ""), ("loss", "router-2", ""), ("rate", "d1", ""),
]  # fmt: skip


@pytest.mark.parametrize("fault", [*CAN_CUT, *CANNOT_CUT], ids="-".join)
def test_an_answer_is_cut_by_faults_of_its_router_and_its_decode_worker_alone(
    run: Run, fault: tuple[str, str, str]
) -> None:
    run.faults, run.kinds = [run.fault(*fault)], (fault[0],)
    run.cut(51.0, prefill_agent="p1", decode_agent="d1")
    assert run.unmet() == (
        {} if fault in CAN_CUT else {"explained": f"request {ASKED} at 51.0 s by router-2: peer_gone"}
    )


@pytest.mark.parametrize(("victim", "is_explained"), [("d1", True), ("d2", True), ("p1", False)])
def test_an_answer_whose_workers_are_not_known_is_cut_by_any_decode_worker(
    run: Run, victim: str, is_explained: bool
) -> None:
    run.faults = [run.fault("kill", victim)]
    run.cut(51.0)
    assert list(run.unmet()) == ([] if is_explained else ["explained"])


@pytest.mark.parametrize(
    ("name", "is_named", "is_right"),
    [
        ("peer_gone", True, True),
        ("deadline", True, True),
        ("closed", True, True),
        ("internal", True, False),
        ("error_without_code", False, False),
        ("closed_in_answer", False, False),
        ("answer_too_long", False, False),
    ],
)
def test_an_answer_that_had_begun_ends_by_one_of_some_names(
    run: Run, name: str, is_named: bool, is_right: bool
) -> None:
    run.faults = [run.fault("kill", "d1")]
    run.cut(51.0, name, is_named=is_named)
    assert list(run.unmet()) == ([] if is_right else ["named"])


def test_an_answer_that_ends_without_a_word_by_a_router_that_was_killed(run: Run) -> None:
    run.cut(51.0, "closed_in_answer", router="router-1", is_named=False)
    assert run.unmet() == {}
    run.cut(51.0, "internal", router="router-1")
    assert run.unmet() == {"named": f"request {ASKED + 1} at 51.0 s by router-1: internal"}


def test_an_answer_that_never_ended_is_excused_by_no_fault(run: Run) -> None:
    run.cut(51.0, "answer_too_long", router="router-1", is_named=False)
    run.fail(51.0, "answer_too_long", router="router-1", is_named=False)
    assert list(run.unmet()) == ["named"]


def test_a_failure_while_there_was_no_fault(run: Run) -> None:
    for at_s in (20.0, 55.5, 57.0):
        run.cut(at_s, router="router-1")
    first, third = f"request {ASKED} at 20.0 s", f"request {ASKED + 2} at 57.0 s"
    assert run.unmet() == {"explained": f"{first} by router-1: peer_gone; {third} by router-1: peer_gone"}


def test_a_request_that_no_router_answered(run: Run) -> None:
    run.fail(51.0, "connect_refused", outcome="failed")
    assert run.unmet() == {"avoidable": f"request {ASKED} at 51.0 s: no router answered"}


@pytest.mark.parametrize(
    ("what", "rate"), [("memory_mb", 0.1), ("shared_mb", 0.1), ("descriptors", 0.1), ("threads", 0.05)]
)
def test_what_grows(run: Run, what: str, rate: float) -> None:
    run.processes.append(run.process(**{what: rate}))
    (rule,) = run.unmet()
    assert rule == what.removesuffix("_mb")


def test_growth_of_a_process_that_is_not_old_enough_or_not_ours_is_not_judged(run: Run) -> None:
    run.processes += [run.process(seconds=120, memory_mb=1.0), run.process("etcd", memory_mb=1.0)]
    assert run.unmet() == {}


def test_a_long_run_in_which_no_process_of_a_role_ran_long(run: Run) -> None:
    run.span_s = 600.0
    run.asked = [run.request(number, number / 4) for number in range(5 * ASKED)]
    run.processes.append(run.process("coordinator", part="coordinator-2"))
    assert run.unmet() == {}
    run.processes[0] = run.process(seconds=470)
    assert run.unmet() == {"lived": "no router ran for more than 78% of the run"}
    run.span_s = 150.0
    assert run.unmet() == {}, "too short to see growth in it"


# --- judge: stranded blocks ---


def test_a_block_that_a_worker_holds_until_it_is_killed(run: Run) -> None:
    run.processes.append(run.process("decode", seconds=100, part="d1"))
    run.blocks = [(at_s, part, 3 if part == "d1" and at_s > 30 else held) for at_s, part, held in run.blocks]
    run.blocks = [each for each in run.blocks if each[0] < 100 or each[1] != "d1"]
    assert run.unmet() == {"stranded": "d1 (pid 7) never held less than 3 blocks in the 60 s before 99 s"}


def test_a_worker_that_was_without_a_block_once_or_was_hardly_seen_or_ran_for_a_moment_holds_none(run: Run) -> None:
    run.blocks = [(at_s, part, 0 if at_s == 550 else 9) for at_s, part, _ in run.blocks]
    assert run.unmet() == {}
    run.processes.append(run.process("decode", seconds=69, part="d1"))
    assert run.unmet() == {}
    run.blocks = [each for each in run.blocks if each[1] != "d1" or each[0] > 592]
    assert run.unmet() == {}


def test_blocks_that_were_never_seen(run: Run) -> None:
    run.blocks, run.span_s = [], 140.0
    assert run.unmet() == {"stranded": "no worker's blocks were seen for long enough"}


# --- judge: the rest ---


def test_what_is_stranded_ended_or_never_whole(run: Run) -> None:
    run.held = {"d1": {"reserved": 3}}
    run.endings = [{"at_s": 5.0, "part": "p1", "what": "ended by itself with code -11"}]
    run.faults = [dataclasses.replace(run.faults[0], whole_s=None)]
    assert run.unmet() == {
        "stranded": "d1 holds {'reserved': 3}",
        "ended": "p1 at 5.0 s ended by itself with code -11",
        "whole": "kill router-1 at 50.0 s: not whole again",
    }


def test_a_run_that_is_not_whole_at_its_end(run: Run) -> None:
    run.whole_s = None
    assert run.unmet() == {"whole": "not whole at the end"}


def test_a_run_that_asked_too_little(run: Run) -> None:
    whole, run.asked = run.asked, [asked for asked in run.asked if asked.number % 10]
    assert run.unmet() == {}
    run.asked = whole[::2]
    assert run.unmet() == {"enough": f"only {ASKED // 2} right answers in 120 s"}


def test_prompts_that_were_meant_for_prefill_workers_and_computed_elsewhere(run: Run) -> None:
    for asked in run.asked[:100]:
        asked.transfer = "local"
    assert run.unmet() == {"enough": f"only {ASKED - 100} of {ASKED} prompts were computed by a prefill worker"}


@pytest.mark.parametrize(("first", "last"), [(0, 49), (200, 249), (ASKED - 49, ASKED)])
def test_a_service_that_stands_still(run: Run, first: int, last: int) -> None:
    """At the beginning, in the middle, or at the end, where its clients wait."""
    for asked in run.asked[first:last]:
        asked.took_s = max(asked.took_s, last / 4 - asked.at_s)
        asked.outcome = "right" if last < ASKED else "left"
    (rule,) = run.unmet()
    assert rule == "steady"


def test_a_service_that_stands_still_for_some_seconds(run: Run) -> None:
    for asked in run.asked[200:230]:
        asked.took_s = 230 / 4 - asked.at_s
    assert run.unmet() == {}


# --- judge: faults ---


def test_faults_that_should_have_been_there(run: Run) -> None:
    run.kinds, run.planned = ("kill", "clock"), 2
    run.left_out = {"clock": "no compiler", "rate": "no tc"}
    run.faults *= 2
    assert run.unmet() == {"faults": "no fault clock: no compiler"}
    run.left_out = {}
    assert run.unmet() == {"faults": "no fault clock happened"}
    run.planned = 1
    assert run.unmet() == {}, "too short for each kind"


def test_a_plan_of_which_too_little_happened(run: Run) -> None:
    run.faults, run.planned = run.faults * 7, 10
    assert run.unmet() == {}
    run.planned = 11
    assert run.unmet() == {"faults": "only 7 of 11 faults happened"}
    run.faults = []
    assert run.unmet() == {"faults": "no fault kill happened; only 0 of 11 faults happened"}


def test_a_machine_that_had_no_time(run: Run) -> None:
    run.late.append((40.0, 2.5))
    assert run.unmet() == {"undisturbed": "the machine let this program wait for 2.5 s at 40 s"}


def test_the_picture_of_a_run_is_svg_and_names_its_faults(parts: Any, run: Run) -> None:
    run.fail(51.0, "connect_<refused>")
    soaked = run.soaked()
    text = parts["picture"].svg(soaked, parts["judge"].judge(soaked), "a title", [(1.0, "p1", 4), (2.0, "p1", 0)])
    xml.etree.ElementTree.fromstring(text)
    assert "router-1" in text
    assert "connect_&lt;refused&gt;" in text


# --- all of it ---


def soaked(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=ROOT, check=False)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_it_runs(parts: Any, tmp_path: pathlib.Path) -> None:
    if (why := parts["box"].obstacle()) or (why := parts["cluster"].obstacle()):
        pytest.skip(why)
    done = soaked("--minutes", "1", "--out", str(tmp_path))
    assert done.returncode in (0, 1), done.stdout + done.stderr
    told = json.loads((tmp_path / "run.json").read_text())
    unmet = {verdict["rule"] for verdict in told["verdicts"] if not verdict["is_met"]}
    if "undisturbed" in unmet:  # what a machine without time makes of agents and routers is no failure of this test
        unmet &= {"tokens", "stranded"}
    assert not unmet, done.stdout
    assert told["faults"]
    xml.etree.ElementTree.parse(tmp_path / "soak.svg")
    assert {path.stem for path in (tmp_path / "logs").iterdir()} == set(parts["cluster"].ROLES)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_nothing_is_left_of_it_when_it_is_killed(parts: Any, tmp_path: pathlib.Path) -> None:
    if (why := parts["box"].obstacle()) or (why := parts["cluster"].obstacle()):
        pytest.skip(why)
    mark = f"KVXFER_SOAK_MARK={tmp_path}"
    name, _, value = mark.partition("=")
    command = [sys.executable, str(SCRIPT), "--minutes=5", "--out", str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, name: value}
    ) as started:
        assert started.stdout is not None
        while "processes see each other" not in (line := started.stdout.readline()):
            assert line, "it ended"
        assert len(marked(mark)) > len(parts["cluster"].ROLES)
        started.kill()
    deadline_s = time.monotonic() + 30.0
    while left := marked(mark):
        assert time.monotonic() < deadline_s, f"still there: {left}"
        time.sleep(0.05)


def marked(mark: str) -> list[int]:
    """Processes with ``mark`` in their environment."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found
