"""``kvxfer load`` whole, against engines without a model: what it prints, leaves and returns."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvxfer.cli import main
from kvxfer.load.served import StartedService, serve_command, served
from tests.support.mock_engine.mocks import mocks

ROOT = pathlib.Path(__file__).resolve().parents[2]
GUIDELLM = str(ROOT / "tests/load/importers/data/guidellm.json")
COMMAND = [sys.executable, "-P", "-m", "kvxfer.cli", "load"]
SHORT = ["--rate=200", "--requests=40", "--prompt-tokens=32", "--output-tokens=4"]
VERDICTS_OF_A_BUSY_MACHINE = {"generator_late", "undelivered"}


@pytest.fixture(scope="module")
def service() -> Iterator[StartedService]:
    with served(serve_command("--mock=--ttft-ms 1 --itl-ms 1"), start_s=60.0) as started:
        yield started


def load(*words: str, cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=120, cwd=cwd)


def document(directory: pathlib.Path) -> dict[str, Any]:
    found = json.loads((directory / "run.json").read_text())
    assert isinstance(found, dict)
    return found


def lines(directory: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "requests.jsonl").read_text().splitlines()]


def check_code(done: subprocess.CompletedProcess[str], directory: pathlib.Path) -> None:
    """0, or 1 where the machine was too busy to send in time, and nothing else was wrong."""
    failed = {one["name"] for one in document(directory)["verdicts"] if one["is_failure"]}
    assert failed <= VERDICTS_OF_A_BUSY_MACHINE
    assert done.returncode == (1 if failed else 0), done.stderr


def test_a_run_says_what_came_of_it(service: StartedService, tmp_path: pathlib.Path) -> None:
    done = load("run", f"--url={service.url}", *SHORT, "--goodput=ttft:5000", "--warmup=5", "--out=out", cwd=tmp_path)
    out = tmp_path / "out"
    check_code(done, out)
    for text in (
        "40 due, 40 sent, 40 good, 0 failed",
        "TTFT",
        "TPOT",
        "E2E",
        "unexplained",
        "of 40 whole answers",
        "attainment  100.0%",
        "goodput",
    ):
        assert text in done.stdout
    assert "run.json, requests.jsonl and summary.csv lie in out; the report: out/report.html" in done.stdout
    assert "sending: 100%" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(lines(out)) == 45
    assert sum(line.get("is_warmup", False) for line in lines(out)) == 5
    [told] = document(out)["runs"]
    assert told["settings"]["target"]["model"] == "mock"
    assert (out / "report.html").stat().st_size > 1 << 20


def test_the_directory_is_named_by_the_time_and_the_report_can_be_written_anew(
    service: StartedService, tmp_path: pathlib.Path
) -> None:
    done = load("run", f"--url={service.url}", *SHORT, "--no-report", cwd=tmp_path)
    [out] = tmp_path.glob("kvxfer-load-*")
    check_code(done, out)
    assert not (out / "report.html").exists()
    again = load("report", str(out), cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert (out / "report.html").exists()


@pytest.mark.deep
def test_the_same_seed_sends_the_same_requests(
    service: StartedService, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        main(["load", "run", f"--url={service.url}", *SHORT, f"--seed={seed}", f"--out={name}", "--no-report"])
    due = [[line["due_s"] for line in sorted(lines(tmp_path / name), key=lambda one: one["number"])] for name in "abc"]
    assert due[0] == due[1]
    assert due[0] != due[2]


@pytest.mark.deep
def test_a_run_that_finds_the_cache_of_the_one_before_says_so(tmp_path: pathlib.Path) -> None:
    """And so does a search, whose probes have salts of their own: a second one has the same."""
    sent = ["--output-tokens=2", "--prompt-tokens=256", "--no-report"]
    run = ["run", "--rate=100", "--requests=30", "--warmup=3", *sent]
    search = ["search", "--start-rate=100", "--probes-max=1", "--probe-requests=100", "--goodput=ttft:5000", *sent]
    with served(serve_command("--mock=--pace steps"), start_s=60.0) as cached:
        for kind, words, runs in (("run", run, {"run"}), ("search", search, {"probe 1", ""})):
            for name, salt in (("first", "one"), ("again", "one"), ("other", "two"))[: 3 if kind == "run" else 2]:
                out = tmp_path / f"{kind}-{name}"
                done = load(*words, f"--url={cached.url}", f"--salt={salt}", f"--out={out}", cwd=tmp_path)
                found = {one["run"] for one in document(out)["verdicts"] if one["name"] == "cache_was_warm"}
                assert found == (runs if name == "again" else set()), (out.name, done.stderr)
                assert ("prefix cache was warm" in done.stdout) == (name == "again"), out.name


@pytest.mark.deep
def test_a_generator_that_cannot_keep_up_fails_the_run(service: StartedService, tmp_path: pathlib.Path) -> None:
    words = ["run", f"--url={service.url}", "--rate=100000", "--requests=1500", "--output-tokens=1", "--processes=1"]
    done = load(*words, "--out=out", "--no-report", cwd=tmp_path)
    assert done.returncode == 1
    assert "The generator was late" in done.stdout
    assert "generator_late" in {one["name"] for one in document(tmp_path / "out")["verdicts"] if one["is_failure"]}


def interrupted(words: Sequence[str], cwd: pathlib.Path, *, at: str, times: int = 1) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command that gets Ctrl-C once stderr has ``at``, and again once it says so."""
    process = subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, start_new_session=True
    )
    try:
        assert process.stderr is not None
        said = ""
        for number in range(times):
            while (at if number == 0 else "stopping") not in said:
                line = process.stderr.readline()
                assert line, said
                said += line
            process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
        return process.returncode, output, said + errors
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_gives_a_report_of_what_ran(service: StartedService, tmp_path: pathlib.Path) -> None:
    words = ["run", f"--url={service.url}", "--rate=50", "--requests=5000", "--output-tokens=2", "--out=out"]
    code, output, errors = interrupted(words, tmp_path, at="sending: 0%")
    assert code == 130, errors
    assert "The run was interrupted" in output
    assert "Traceback" not in errors
    out = tmp_path / "out"
    assert document(out)["runs"][0]["ended"] == "interrupted"
    assert (out / "report.html").exists()
    assert len(lines(out)) == 5000


def test_a_second_ctrl_c_ends_at_once(tmp_path: pathlib.Path) -> None:
    """The service of the point becomes ready later than that, and nothing of it is left."""
    words = ["sweep", "--splits=1:1", "--mock=", "--requests=1", "--out=out"]
    code, _, errors = interrupted(words, tmp_path, at="the service starts", times=2)
    assert code == 130
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["run", "--rate=0"], 2, "rate must be"),
        (["run", "--goodput=ttft"], 2, "a limit must be one of ttft, tpot, e2e, gap, a colon and milliseconds"),
        (["run", "--url=ftp://x"], 2, "url must be like http://127.0.0.1:8000"),
        (["run", "--trace=/nowhere"], 2, "trace /nowhere cannot be read"),
        (["run", "--trace=empty.jsonl"], 2, "empty.jsonl"),
        (["run", "--trace=page.md"], 2, "page.md, line 1: no known format begins so: say with --trace-format"),
        (["run", "--url=http://127.0.0.1:1"], 1, "nothing answers at http://127.0.0.1:1: Connection refused"),
        (["search"], 2, 'a search needs limits, as goodput "ttft:200 tpot:50"'),
        (["search", "--goodput=ttft:9", "--attainment=1"], 2, "a search needs an attainment below 1"),
        (["sweep"], 2, "a sweep needs either splits or workers"),
        (["sweep", "--splits=1:1", "--url=http://127.0.0.1:1"], 2, "a sweep starts the services that it tests"),
        (["import", "/nowhere"], 2, "/nowhere"),
        (["import", GUIDELLM, "--goodput=gap:1"], 2, "guidellm tells no gap of its answers: a limit of it cannot be"),
        (["report", "/nowhere"], 2, "/nowhere is no load test's directory"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    words: list[str],
    code: int,
    said: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "page.md").write_text("# A page\n")
    assert main(["load", *words]) == code
    [last] = capsys.readouterr().err.splitlines()
    assert said in last
    assert last.startswith("kvxfer: ")
    assert {path.name for path in tmp_path.iterdir()} == {"empty.jsonl", "page.md"}, "nothing ran: nothing is left"


def test_no_command_is_a_usage_error(tmp_path: pathlib.Path) -> None:
    done = load(cwd=tmp_path)
    assert done.returncode == 2
    assert "run|search|sweep|import|report" in done.stderr


def test_a_directory_with_files_is_not_taken(service: StartedService, tmp_path: pathlib.Path) -> None:
    (tmp_path / "note").write_text("mine")
    done = load("run", f"--url={service.url}", *SHORT, "--out=.", cwd=tmp_path)
    assert done.returncode == 2
    assert "has files already" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_a_full_disk_keeps_what_ran(service: StartedService, tmp_path: pathlib.Path) -> None:
    """A limit of the process stands for the disk: no file may grow beyond it."""
    source = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (140_000, 140_000))\n"
        "from kvxfer.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = ["load", "run", f"--url={service.url}", "--rate=400", "--requests=3000", "--output-tokens=1", "--out=out"]
    command = [sys.executable, "-P", "-c", source, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    out = tmp_path / "out"
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "The disk was full" in done.stdout
    assert document(out)["runs"][0]["ended"] == "disk_full"
    assert 10 < len(lines(out)) < 3000


def test_another_tools_results_are_judged(tmp_path: pathlib.Path) -> None:
    file = ROOT / "tests/load/importers/data/vllm_bench.json"
    done = load("import", str(file), "--goodput=ttft:100000", "--out=out", cwd=tmp_path)
    assert (tmp_path / "out" / "report.html").exists(), done.stderr
    assert "attainment" in done.stdout
    assert document(tmp_path / "out")["runs"][0]["driver"] == "vllm-bench"


@pytest.mark.deep
def test_a_sweep_over_splits(tmp_path: pathlib.Path) -> None:
    words = ["sweep", "--workers=3", "--mock=--itl-ms 1", *SHORT, "--goodput=ttft:5000", "--out=out"]
    done = load(*words, cwd=tmp_path)
    out = tmp_path / "out"
    check_code(done, out)
    extra = document(out)["extra"]
    assert [point["name"] for point in extra["points"]] == ["1P2D", "2P1D"]
    assert extra["best"] in ("1P2D", "2P1D")
    assert f"The best for each worker is {extra['best']}." in done.stdout
    assert [run["point"]["devices"] for run in document(out)["runs"]] == [3, 3]


@pytest.mark.deep
def test_a_search_ends_with_an_answer_or_a_reason(tmp_path: pathlib.Path) -> None:
    words = ["sweep", "--splits=1:1", "--per-point=search", "--mock=--pace steps --max-num-seqs 4 --step-ms 20"]
    words += ["--goodput=ttft:400", "--start-rate=40", "--probe-requests=100", "--probes-max=2", "--out=out"]
    done = load(*words, "--prompt-tokens=32", "--output-tokens=4", cwd=tmp_path)
    out = tmp_path / "out"
    [point] = document(out)["extra"]["points"]
    assert point["search"]["rate"] or point["search"]["reason"]
    assert point["search"]["sentence"] in done.stdout
    assert done.returncode == (0 if point["search"]["rate"] else 1)
    assert document(out)["runs"][0]["name"] == "1P1D probe 1"


def test_a_point_that_cannot_start_is_said_and_fails_the_sweep(tmp_path: pathlib.Path) -> None:
    words = ["sweep", "--splits=1:1", "--mock=", "--policies=local-prefill=maybe", "--out=out"]
    done = load(*words, cwd=tmp_path)
    assert done.returncode == 1
    assert "1P1D local-prefill=maybe: the service ended with code 2: router could not start" in done.stdout
    [verdict] = document(tmp_path / "out")["verdicts"]
    assert (verdict["name"], verdict["is_failure"]) == ("point_failed", True)


def test_help_needs_no_extra() -> None:
    source = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('plotly', 'httptools', 'httpx', 'torch', 'uvloop')))\n"
        "from kvxfer.cli import main\n"
        "main(['load', 'run', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--goodput" in done.stdout


@pytest.mark.deep
def test_a_search_warms_engines_up_before_its_first_probe(tmp_path: pathlib.Path) -> None:
    """The first 40 requests take two seconds more. How near the rate comes to the 50 requests/s of four places, and
    four tokens of 20 ms each, is a matter of the machine's speed: benchmarks/load_search.py."""
    words = ["search", "--goodput=ttft:400", "--start-rate=20", "--probe-requests=150", "--probes-max=6", "--no-report"]
    with mocks("--pace=steps", "--max-num-seqs=4", "--step-ms=20") as started:
        started.engines[0].fault("late", delay_s=2.0, count=40)
        url = f"--url=http://127.0.0.1:{started.engines[0].port}"
        done = load(*words, url, "--prompt-tokens=32", "--output-tokens=4", "--out=out", cwd=tmp_path)
    found = document(tmp_path / "out")["extra"]["search"]
    assert found["warmup"]["is_settled"], found["warmup"]
    assert found["warmup"]["medians_s"][0] > 2 > 4 * found["warmup"]["medians_s"][-1]
    assert found["rate"], done.stdout
