"""The public surface: exactly these names, loaded lazily, and a stub that says what the native core is."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

import kvxfer

PUBLIC = {
    "Agent",
    "AgentConfig",
    "AgentPost",
    "AgentRef",
    "ChecksumMode",
    "CompatibilityRecord",
    "DataAddress",
    "Delivery",
    "Exposure",
    "Grant",
    "GrantState",
    "Incarnation",
    "KvxferError",
    "Lane",
    "Member",
    "MemoryNetwork",
    "MemoryRegistration",
    "Notification",
    "Op",
    "Pool",
    "PoolRecord",
    "ProgressMode",
    "RegionRecord",
    "Role",
    "Segment",
    "Transfer",
    "TransferId",
    "TransferResult",
    "TransferState",
    "WorkerInfo",
    "__version__",
    "allocate_region",
    "errors",
}


def run_python(source: str) -> str:
    done = subprocess.run([sys.executable, "-P", "-c", source], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_exported_names() -> None:
    assert set(kvxfer.__all__) == PUBLIC
    assert len(PUBLIC) <= 35
    assert set(dir(kvxfer)) >= PUBLIC


def test_every_name_resolves() -> None:
    for name in PUBLIC:
        assert getattr(kvxfer, name) is not None


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Agnet'"):
        kvxfer.Agnet  # noqa: B018


def test_import_is_light() -> None:
    heavy = run_python(
        "import sys, kvxfer\n"
        "print([name for name in ('grpc', 'torch', 'numpy', 'google.protobuf', 'fastapi') if name in sys.modules])"
    )
    assert heavy.strip() == "[]"


def test_agent_loads_neither_torch_nor_fastapi() -> None:
    heavy = run_python(
        "import sys, kvxfer\nkvxfer.Agent\n"
        "print([name for name in ('torch', 'transformers', 'fastapi', 'uvicorn') if name in sys.modules])"
    )
    assert heavy.strip() == "[]"


def test_stub_equals_runtime(tmp_path: pathlib.Path) -> None:
    fresh = tmp_path / "_core.pyi"
    command = [sys.executable, "-P", "-m", "nanobind.stubgen", "-q", "-m", "kvxfer._native._core", "-o", str(fresh)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    committed = pathlib.Path(kvxfer.__file__).parent / "_native" / "_core.pyi"
    # Since Python 3.12 classes with the buffer protocol show a method of it.
    text = re.sub(r'\n    def __buffer__\(.*\n        """\n(?:.*\n)*?        """\n', "", fresh.read_text())
    assert text == committed.read_text(), "run `make stub`"
