"""The generated code is fresh, and imports and works on the oldest and the newest grpcio and protobuf that pyproject
allows.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tomllib
import venv

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.checkout]

PROBE = """
import warnings
warnings.simplefilter("error")
import google.protobuf, grpc, grpc.aio
from grpc.aio import EOF
from kvxfer._pb import control_pb2, control_pb2_grpc, health_pb2
member = control_pb2.Member(ref=control_pb2.AgentRef(agent_id="a"), pools=[control_pb2.PoolRecord(pool_id=3)])
assert control_pb2.Member.FromString(member.SerializeToString()) == member
assert health_pb2.HealthResponse.SERVING == 1
stub = control_pb2_grpc.CoordinatorStub(grpc.insecure_channel("127.0.0.1:1"))
assert callable(stub.Session)
print(grpc.__version__, google.protobuf.__version__)
"""


def bounds(root: pathlib.Path) -> dict[str, str]:
    """Lower bounds of the two packages, from pyproject.toml."""
    dependencies = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    found = dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", line).groups() for line in dependencies if ">=" in line)  # type: ignore[union-attr, misc]
    return {name: found[name] for name in ("grpcio", "protobuf")}


@pytest.mark.parametrize("end", ["oldest", "newest"])
@pytest.mark.timeout(280)
def test_the_generated_code_works_at_both_ends(end: str, root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    package = tmp_path / "package"
    (package / "kvxfer" / "_pb").mkdir(parents=True)
    (package / "kvxfer" / "__init__.py").touch()
    for path in (root / "kvxfer" / "_pb").glob("*.py"):
        (package / "kvxfer" / "_pb" / path.name).write_text(path.read_text())
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    low = bounds(root)
    wanted = [f"{name}=={version}" for name, version in low.items()] if end == "oldest" else list(low)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:", *wanted]
    subprocess.run(install, check=True, timeout=250)
    environment = {**os.environ, "PYTHONPATH": str(package)}
    probe = subprocess.run(
        [python, "-c", PROBE], check=True, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment
    )
    grpc_version, protobuf_version = probe.stdout.split()
    if end == "oldest":
        assert grpc_version.startswith(low["grpcio"])
        assert protobuf_version.startswith(low["protobuf"])


@pytest.mark.timeout(280)
def test_the_generated_code_is_fresh(root: pathlib.Path) -> None:
    if sys.version_info >= (3, 13):
        pytest.skip("the pinned compiler has no wheel for this Python; 3.11 and 3.12 check it")
    check = subprocess.run(
        [sys.executable, root / "protos" / "generate.py", "--check"], capture_output=True, text=True, timeout=250
    )
    assert check.returncode == 0, check.stderr
