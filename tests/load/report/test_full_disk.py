"""A full disk: one sentence, and what was written before stays and can be read."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import subprocess
import sys

import pytest

from kvxfer.load.artefacts import REQUESTS_FILE, RUN_FILE, DiskFullError, RunDirectory, read
from tests.support.load_made_up import made_up_run

FILL = """
import json, pathlib, resource, signal, sys
from kvxfer.load import artefacts
from tests.support.load_made_up import finished, made_up_run
path, limit = pathlib.Path(sys.argv[1]), int(sys.argv[2])
run = made_up_run(requests=2000)
if limit:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
said, kept = "", 0
directory = artefacts.RunDirectory.create(path)
try:
    for kept, record in enumerate(run.records):
        directory.append(record)
except artefacts.DiskFullError as error:
    said = str(error)
run.records = run.records[:kept]
run.ended = "disk_full"
made = finished("run", [run])
try:
    directory.finish(made.kind, made.runs, made.summaries, made.verdicts)
except artefacts.DiskFullError as error:
    print(json.dumps({"finish": str(error)}))
    sys.exit()
back = artefacts.read(path)
print(json.dumps({"said": said, "asked": kept, "read": len(back.runs[0].records), "notes": back.notes,
                  "bytes": (path / artefacts.REQUESTS_FILE).stat().st_size, "ended": back.runs[0].ended}))
"""


def filled(path: pathlib.Path, limit: int, *before: str) -> dict[str, object]:
    """What a process says whose files cannot all be written."""
    command = [*before, sys.executable, "-c", FILL, str(path), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_a_file_that_may_not_grow(tmp_path: pathlib.Path) -> None:
    told = filled(tmp_path / "out", 200_000)
    assert str(told["said"]).startswith("the file may not grow: ")
    assert str(told["said"]).endswith(f"requests.jsonl has {told['bytes']:,} bytes, all of which can be read")
    assert 190_000 < int(str(told["bytes"])) <= 200_000
    assert told["ended"] == "disk_full"
    assert told["notes"] == []
    assert 150 < int(str(told["read"])) <= int(str(told["asked"]))


def test_a_disk_that_is_full(tmp_path: pathlib.Path) -> None:
    """On a file system of 512 KiB, in a mount namespace that only the process has."""
    script = f'mount -t tmpfs -o size=512k none {tmp_path} && exec "$@"'
    unshare = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if os.geteuid() or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount")
    told = filled(tmp_path / "out", 0, *unshare)
    assert str(told["said"]).startswith("the disk is full: ")
    assert told["ended"] == "disk_full"
    assert told["notes"] == []
    assert 200 < int(str(told["read"])) <= int(str(told["asked"]))


def test_a_directory_that_has_no_space_for_a_load_test_stays_empty(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the same command would be refused once there is space, for a file that says nothing."""
    from kvxfer.load import artefacts

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(artefacts.os, "fsync", fsync)
        with pytest.raises(DiskFullError, match="there is no space for a load test in"):
            RunDirectory.create(tmp_path / "out")
    RunDirectory.create(tmp_path / "out").close()


def test_a_device_without_space(tmp_path: pathlib.Path) -> None:
    run = made_up_run(requests=2)
    directory = RunDirectory.create(tmp_path)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, directory._descriptor)
    os.close(full)
    directory.append(run.records[0])
    with pytest.raises(DiskFullError, match=r"the disk is full: .* has 0 bytes"):
        directory.flush()
    with pytest.raises(DiskFullError):
        directory.append(run.records[1])
    directory.close()


def test_the_report_of_a_full_disk_leaves_the_old_one(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvxfer.load import artefacts

    (tmp_path / "report.html").write_text("the old one")

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(artefacts.os, "fsync", fsync)
    with pytest.raises(DiskFullError, match="the disk is full"):
        artefacts.write_whole(tmp_path / "report.html", "the new one")
    assert (tmp_path / "report.html").read_text() == "the old one"


def test_no_more_than_a_second_is_lost_when_the_process_dies(tmp_path: pathlib.Path) -> None:
    """A process that is killed has written what it appended a while ago."""
    source = (
        "import os, sys\n"
        "from kvxfer.load import artefacts\n"
        "from tests.support.load_made_up import made_up_run\n"
        "artefacts.FLUSH_S = 0.0\n"
        "directory = artefacts.RunDirectory.create(sys.argv[1])\n"
        "for record in made_up_run(requests=50).records:\n"
        "    directory.append(record)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", source, str(tmp_path)], timeout=120, check=False)
    assert done.returncode == -9
    assert len(read(tmp_path).runs[0].records) == 50
    assert not (tmp_path / RUN_FILE).exists()
    assert (tmp_path / REQUESTS_FILE).read_bytes().count(b"\n") == 50
