"""benchmarks/router.py: that it notices wrong answers, judges by the bars it shows, and runs."""

from __future__ import annotations

import importlib
import json
import pathlib
import subprocess
import sys
import xml.etree.ElementTree
from typing import Any

import pytest

pytestmark = pytest.mark.checkout

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's own packages."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("contenders", "load", "measures", "plot", "proc", "processes", "tables"):
        importlib.import_module(f"routers.{name}")
    yield sys.modules
    for name in [name for name in sys.modules if name.split(".")[0] == "routers"]:
        del sys.modules[name]


def stream(*texts: str, end: bytes = b"data: [DONE]\n\n") -> bytes:
    events = [json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": None}]}) for text in texts]
    return b"".join(b"data: " + event.encode() + b"\n\n" for event in events) + end


def test_right_answer_passes_however_its_json_is_spaced(parts: Any) -> None:
    load = parts["routers.load"]
    expected = load.check(load.Answer(200, stream(" a", ' "b'), 0.0), 2, None)
    load.check(load.Answer(200, stream(" a", ' "b'), 0.0), 2, expected)
    load.check(
        load.Answer(200, stream(" a", ' "b').replace(b": ", b":").replace(b"data:", b"data: "), 0.0), 2, expected
    )
    load.check(load.Answer(200, stream(" \\u0061", "").replace(b"\\\\u", b"\\u"), 0.0), 2, b" a")


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (503, stream(" a", " b"), "status 503"),
        (200, stream(" a", " b", end=b""), r"not \[DONE\]"),
        (200, stream(" a"), "2 events for 2 tokens"),
        (200, stream(" a", " b", " c"), "4 events for 2 tokens"),
        (200, stream(" a", " x"), "the text is ' a x'"),
        (200, stream(" b", " a"), "the text is"),
        (200, b'data: {"error": {}}\n\n' + stream(" a"), "no completion"),
    ],
)
def test_wrong_answer_is_told(parts: Any, status: int, body: bytes, why: str) -> None:
    load = parts["routers.load"]
    with pytest.raises(load.WrongAnswer, match=why):
        load.check(load.Answer(status, body, 0.0), 2, b" a b")


def test_prompts_differ_early_and_have_their_length(parts: Any) -> None:
    found = parts["routers.load"].prompts(64, 2048)
    assert {len(text) for text in found} == {2048}
    assert len({text[:16] for text in found}) == 64


def turn(contender: str, measure: str, **figures: float) -> dict[str, Any]:
    return {"dialect": "vllm", "contender": contender, "measure": measure, "set": 0, "turn": 0, "figures": figures}


def test_ratio_is_that_of_medians_to_the_best_peer(parts: Any) -> None:
    tables = parts["routers.tables"]
    turns = [turn("kvxfer", "streams", cpu_s_per_1000=value, requests_per_s=100) for value in (0.8, 0.9, 4.0)]
    turns += [turn("vllm-router", "streams", cpu_s_per_1000=value, requests_per_s=90) for value in (1.0, 1.0, 0.1)]
    turns += [turn("smg", "streams", cpu_s_per_1000=1.2, requests_per_s=200)]
    cpu, rate = tables.rows(turns)
    assert (cpu["best_peer"], cpu["ratio"], cpu["is_held"]) == ("vllm-router", 0.9, True)
    assert (rate["best_peer"], rate["ratio"], rate["is_held"]) == ("smg", 0.5, None)
    text = tables.markdown([cpu, rate], {"kvxfer": "kvxfer", "smg": "smg 1"})
    assert (
        "| CPU s per 1,000 streams | 0.90 (0.85 to 2.45) | 1.20 | 0.90 | at most 1 of the best peer, goal 0.8 |" in text
    )


def test_missed_bars_are_named(parts: Any) -> None:
    tables = parts["routers.tables"]
    turns = [turn("kvxfer", "unpaced", requests_per_s=90), turn("smg", "unpaced", requests_per_s=100)]
    turns += [turn("kvxfer", "unloaded", added_ttft_ms=1.5), turn("smg", "unloaded", added_ttft_ms=2.0)]
    turns += [turn("kvxfer", "memory", stream_kib=59.0), turn("smg", "memory", stream_kib=10.0)]
    rows = tables.rows(turns)
    assert [row["is_held"] for row in rows] == [False, False, True]
    assert len(list(tables.misses(rows))) == 2
    assert "**0.90**" in tables.markdown(rows, {"kvxfer": "kvxfer", "smg": "smg"})


def test_kvxfer_alone_has_no_ratio(parts: Any) -> None:
    [row] = parts["routers.tables"].rows([turn("kvxfer", "streams", cpu_s_per_1000=1.0)])
    assert (row["best_peer"], row["ratio"], row["is_held"]) == (None, None, None)


def test_picture_is_xml(parts: Any) -> None:
    turns = [turn("kvxfer", "streams", cpu_s_per_1000=1.0), turn("<peer>", "streams", cpu_s_per_1000=-0.1)]
    root = xml.etree.ElementTree.fromstring(parts["routers.plot"].svg(parts["routers.tables"].rows(turns)))
    assert "<peer>" in "".join(root.itertext())


def test_cpu_and_memory_are_those_of_the_whole_tree(parts: Any) -> None:
    proc = parts["routers.proc"]
    child = "import sys; x = bytearray(b'1' * (32 << 20)); sum(range(10**7)); print(flush=True); sys.stdin.read()"
    parent = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {child!r}]).returncode)"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()
        assert len(proc.tree(started.pid)) == 2
        assert proc.cpu_s(started.pid) > 0.02
        found = proc.memory(started.pid)
        assert found.rss >= found.pss >= found.anonymous > 32 << 10
        started.communicate()
    assert proc.memory(started.pid) == proc.Memory()


def test_command_lines_name_every_engine(parts: Any, tmp_path: pathlib.Path) -> None:
    contenders = parts["routers.contenders"]
    for contender in contenders.CONTENDERS:
        for dialect in contender.dialects:
            place = contenders.Place(dialect, (1001, 1002), (1003, 1004), tmp_path, 1005, 1006, "random", ("--more",))
            command = contender.command(place)
            assert command[-1] == "--more"
            text = " ".join([*command, *(file.read_text() for file in tmp_path.iterdir())])
            assert all(f"127.0.0.1:{port}" in text for port in range(1001, 1005)), (contender, dialect)


def test_run_is_void_where_answers_are_cut_or_prompts_are_not_handed_over(parts: Any, tmp_path: pathlib.Path) -> None:
    processes = parts["routers.processes"]
    job = {"mode": "closed", "dialect": "vllm", "requests": 20, "clients": 4}
    directories = [tmp_path / "engines", tmp_path / "router"]
    for directory in directories:
        directory.mkdir()
    engines = processes.Engines("vllm", 0.0, directories[0])
    # In the router's place: a decode engine that computes every prompt itself.
    router = processes.Router("none", ["sleep", "300"], directories[1], engines.decode[0], engines)
    try:
        with pytest.raises(processes.Void, match="none: 20 prompts were prefilled for 44 requests"):
            router.load(job, False)
        fault = {"fault": "cut", "after_tokens": 5, "count": 1, "leg": "whole"}
        assert processes.ask(router.port, "POST", "/mock/faults", fault)[0] == 200
        with pytest.raises(processes.Void, match="closed before the answer's end"):
            router.load(job, False)
    finally:
        router.end()
        engines.end()


def test_it_runs(tmp_path: pathlib.Path) -> None:
    file, picture = tmp_path / "router.json", tmp_path / "router.svg"
    command = [sys.executable, str(BENCHMARKS / "router.py"), "--check", f"--out={file}", f"--plot={picture}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert {turn["dialect"] for turn in report["turns"]} == {"vllm", "sglang"}
    names = {turn["contender"] for turn in report["turns"]}
    left_out = {line.split(": ")[1] for line in done.stdout.splitlines() if line.startswith("left out: ")}
    assert names | left_out == {"kvxfer", "vllm-router", "sglang-router", "smg"}
    assert "| CPU s per 1,000 streams |" in done.stdout
    assert picture.read_text().startswith("<svg")
