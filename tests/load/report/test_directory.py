"""A load test's directory: what is written is read back, whatever ended the writing."""

from __future__ import annotations

import csv
import json
import os
import pathlib

import pytest

import kvxfer
from kvxfer.errors import ClosedError, ConfigError, InvalidArgumentError
from kvxfer.load import artefacts
from kvxfer.load.artefacts import REQUESTS_FILE, RUN_FILE, SUMMARY_FILE, RunDirectory, read
from tests.support.load_made_up import MadeUp, finished, made_up_run, made_up_search
from tests.support.load_records import failed, run_of
from tests.support.load_schema import violations

SCHEMA = json.loads((pathlib.Path(artefacts.__file__).parent / "run.schema.json").read_text())


def stored(path: pathlib.Path, made: MadeUp) -> artefacts.StoredLoadTest:
    with RunDirectory.create(path) as directory:
        for run in made.runs:
            for record in run.records:
                directory.append(record)
        return directory.finish(made.kind, made.runs, made.summaries, made.verdicts, made.extra)


def test_what_is_written_is_read_back(tmp_path: pathlib.Path) -> None:
    made = made_up_search(60)
    written = stored(tmp_path, made)
    back = read(tmp_path)
    assert back.kind == "search"
    assert back.notes == []
    assert back.document == json.loads(json.dumps(written.document))
    assert [run.name for run in back.runs] == [run.name for run in made.runs]
    for run, original, summary in zip(back.runs, made.runs, made.summaries, strict=True):
        assert [one.to_json() for one in run.records] == [one.to_json() for one in original.records]
        assert run.window_s == original.window_s
        assert run.point == original.point
        assert back.summaries[back.runs.index(run)]["good"] == summary.good
    assert sorted(os.listdir(tmp_path)) == sorted([RUN_FILE, REQUESTS_FILE, SUMMARY_FILE])


@pytest.mark.parametrize(
    "made",
    [
        made_up_search(60),
        finished("run", [made_up_run(requests=20)]),
        finished("import", [run_of([failed(0, 0.5), failed(1, 1.5)])]),
        finished("run", [run_of([])]),
        finished("sweep", []),
    ],
    ids=["search", "run", "all failed", "nothing was due", "no run"],
)
def test_run_json_is_as_its_schema_says(tmp_path: pathlib.Path, made: MadeUp) -> None:
    stored(tmp_path, made)
    document = json.loads((tmp_path / RUN_FILE).read_text())
    assert list(violations(document, SCHEMA, SCHEMA)) == []
    assert document["environment"]["kvxfer"] == kvxfer.__version__
    assert "NaN" not in (tmp_path / RUN_FILE).read_text()
    assert os.uname().nodename not in json.dumps(document["environment"])


def test_the_schema_check_finds_what_is_wrong(tmp_path: pathlib.Path) -> None:
    document = stored(tmp_path, made_up_search(60)).document
    document["runs"][0]["window_s"] = [0.0]
    document["runs"][1]["summary"]["due"] = -1
    document["more"] = document.pop("extra")
    wrong = " ".join(violations(document, SCHEMA, SCHEMA))
    for said in ("$.runs[0].window_s", "$.runs[1].summary", "$.extra is missing", "$.more may not be there"):
        assert said in wrong


def test_the_table_has_a_row_for_each_run(tmp_path: pathlib.Path) -> None:
    made = made_up_search(60)
    made.runs[0].workload = "=HYPERLINK(1)"
    stored(tmp_path, made)
    with open(tmp_path / SUMMARY_FILE, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == [run.name for run in made.runs]
    assert [int(row["good"]) for row in rows] == [one.good for one in made.summaries]
    assert float(rows[0]["attainment.low"]) == made.summaries[0].attainment.low
    assert rows[0]["point.rate"] == "4.0"
    assert rows[0]["workload"] == "'=HYPERLINK(1)", "a spreadsheet computes nothing of it"


def test_secrets_are_left_out(tmp_path: pathlib.Path) -> None:
    made = finished("run", [made_up_run(requests=5)])
    made.runs[0].settings = {"target": {"api_key": "sesame-1", "api_key_file": "keys"}, "authorization": "sesame-2"}
    stored(tmp_path, made)
    text = (tmp_path / RUN_FILE).read_text()
    assert "sesame" not in text
    assert read(tmp_path).runs[0].settings["target"]["api_key_file"] == "keys"


def test_a_directory_with_files_is_not_taken(tmp_path: pathlib.Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="has files already; name a new or an empty directory"):
        RunDirectory.create(tmp_path)
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_a_file_is_no_directory(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="cannot write into the directory"):
        RunDirectory.create(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot write into the directory"):
        RunDirectory.create(tmp_path / "file" / "below")


def test_a_run_that_was_killed_can_be_read(tmp_path: pathlib.Path) -> None:
    run = made_up_run(requests=30)
    directory = RunDirectory.create(tmp_path / "deep" / "new")
    for record in run.records:
        directory.append(record)
    directory.flush()
    back = read(directory.path)
    assert back.kind == "unfinished"
    assert back.notes == ["run.json is missing: the load test was cut off, and all of its requests are counted."]
    assert len(back.runs[0].counted) == 30
    directory.close()
    with pytest.raises(ClosedError):
        directory.append(run.records[0])


def test_a_cut_last_line_is_left_out_and_said(tmp_path: pathlib.Path) -> None:
    stored(tmp_path, finished("run", [made_up_run(requests=5)]))
    lines = (tmp_path / REQUESTS_FILE).read_bytes()
    (tmp_path / REQUESTS_FILE).write_bytes(lines[:-20])
    back = read(tmp_path)
    assert len(back.runs[0].records) == 4
    assert back.notes[0] == "The last line of requests.jsonl was cut and is left out."
    (tmp_path / REQUESTS_FILE).write_bytes(lines.replace(b"{", b"", 1))
    with pytest.raises(InvalidArgumentError, match=r"requests.jsonl, line 1: not a record"):
        read(tmp_path)


@pytest.mark.parametrize(
    "member",
    [
        *({"due_s": value} for value in ("1", None, float("nan"), True, 1e300)),
        *({"first_s": []}, {"output_tokens": 1.5}, {"error": None}, {"run": 7}, {"is_new": 1}),
    ],
    ids=str,
)
def test_a_line_with_a_value_of_another_kind_is_told(tmp_path: pathlib.Path, member: dict[str, object]) -> None:
    stored(tmp_path, finished("run", [made_up_run(requests=2)]))
    first, second = (tmp_path / REQUESTS_FILE).read_text().splitlines()
    (tmp_path / REQUESTS_FILE).write_text(f"{first}\n{json.dumps({**json.loads(second), **member})}\n")
    with pytest.raises(InvalidArgumentError, match=r"requests.jsonl, line 2: not a record of a load test"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is no load test's directory: it has no run.json"),
        ("{", "is not JSON"),
        ("[]", "is not of a load test: it has no schema_version"),
        ('{"schema_version": 99}', "has schema version 99; this kvxfer reads 1"),
        ('{"schema_version": 1, "kind": "run", "runs": [{}]}', "has a run that cannot be read"),
        ('{"schema_version": 1, "kind": "run", "runs": 7}', "has no list of runs"),
    ],
)
def test_what_is_no_load_test_is_told_in_a_sentence(tmp_path: pathlib.Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / RUN_FILE).write_text(content)
    with pytest.raises(InvalidArgumentError, match=said):
        read(tmp_path)
    with pytest.raises(InvalidArgumentError):
        read(tmp_path / "is-not-there")


def test_other_kinds_and_numbers_of_summaries_are_refused(tmp_path: pathlib.Path) -> None:
    with RunDirectory.create(tmp_path) as directory:
        with pytest.raises(InvalidArgumentError, match="kind must be one of run, search, sweep, import"):
            directory.finish("walk", [], [])
        with pytest.raises(InvalidArgumentError, match="one summary for each run"):
            directory.finish("run", [run_of([])], [])
