"""``kvxfer model`` and ``kvxfer doctor``: what they print and how they end."""

from __future__ import annotations

import json
import pathlib

import pytest

from kvxfer import cli
from kvxfer.cli import console, doctor
from kvxfer.errors import ConfigError


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvxfer" / "models"


def test_list_and_remove(cache: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["model", "--list"]) == 0
    assert capsys.readouterr().out.startswith("no models in ")
    (cache / "small").mkdir(parents=True)
    (cache / "small" / "weights").write_bytes(bytes(2_000_000))
    (cache / ".small.lock").touch()
    assert cli.main(["model", "--list"]) == 0
    assert capsys.readouterr().out.split()[:3] == ["small", "2.0", "MB"]
    assert cli.main(["model", "--remove", "small"]) == 0
    assert not (cache / "small").exists()


@pytest.mark.parametrize("name", ["small", "../models", ".small.lock", ""])
def test_remove_what_is_not_there(name: str, cache: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.mkdir(parents=True)
    (cache / ".small.lock").touch()
    assert cli.main(["model", "--remove", name]) == 2
    assert "there is no model" in capsys.readouterr().err
    assert (cache / ".small.lock").exists()


def test_local_directory(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert cli.main(["model", str(tmp_path)]) == 0
    assert str(tmp_path) in capsys.readouterr().out


def test_missing_model_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["model", "no-such-model"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("kvxfer: model 'no-such-model'")
    assert text.count("\n") == 1


def test_doctor_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for lane in ("mapped", "unix", "stream"):
        assert any(line.split()[:2] == [lane, "yes"] for line in lines)
    for lane in ("cma", "ucx"):  # of the host and of what is installed; but there is always a word of it
        assert any(line.split()[0] == lane and line.split()[1] in ("yes", "no") for line in lines if line)


def test_doctor_knows_what_the_operator_allows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVXFER_LANES", "stream")
    assert cli.main(["doctor", "--json"]) == 0
    findings = {f["name"]: f for f in json.loads(capsys.readouterr().out)["findings"] if f["section"] == "lanes"}
    assert [name for name, finding in findings.items() if finding["is_ok"]] == ["stream"]
    assert findings["cma"]["detail"] == "not allowed by KVXFER_LANES"
    monkeypatch.setenv("KVXFER_LANES", "stream,warp")
    assert cli.main(["doctor"]) == 2
    assert "'warp', which is no lane" in capsys.readouterr().err


def test_doctor_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {finding["section"] for finding in findings} == {"core", "lanes", "files", "host", "versions"}


def test_doctor_coordinator_down(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--coordinator", "127.0.0.1:1", "--timeout-s", "0.3"]) == 1
    assert "not reachable within 0.3 s" in capsys.readouterr().out


def test_doctor_says_why_a_lane_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> str:
        raise ConfigError("memfd seals are refused")

    monkeypatch.setattr(doctor, "_mapped", refused)
    mapped = next(finding for finding in doctor.lanes() if finding.name == "mapped")
    assert (mapped.is_ok, mapped.detail) == (False, "memfd seals are refused")


def test_words_for_people() -> None:
    assert [console.size(n) for n in (0, 999, 46_080, 1.5e6, 2.5e9)] == ["0 B", "999 B", "46.1 KB", "1.5 MB", "2.5 GB"]
    assert [console.duration(s) for s in (8e-4, 0.0615, 2.03)] == ["800 us", "61.5 ms", "2.03 s"]
    assert console.table([["a", "b"], ["long", "c"]], indent="") == "a     b\nlong  c"


def test_progress_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = console.ProgressBar()
    for done in range(0, 101):
        progress("download", done, 100)
    progress("convert", 0, 0)
    progress.close()
    progress = console.ProgressBar(of="tiny")
    progress("write", 1, 2)
    lines = capsys.readouterr().err.splitlines()
    assert lines.pop() == "  tiny: write: 50%"
    assert lines == [*(f"  download: {share}%" for share in (0, 25, 50, 75, 100)), "  convert"]
