"""The commands with certificates: one vocabulary of flags, and one sentence for what is wrong with them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import sys

import pytest

from kvxfer.cli import main
from kvxfer.cli.services import options_class
from kvxfer.trust.identity import CertRole
from tests.support.trust import ClusterAuthority, coordinator_process, watch

pytest.importorskip("cryptography")

MEMBERS = ("worker", "router", "tier")


def shown(ca: ClusterAuthority, role: CertRole, name: str) -> list[str]:
    issued = ca.issue(role, name)
    return [
        f"--coordinator-ca-file={ca.ca_file}",
        f"--coordinator-cert-file={issued.cert_file}",
        f"--coordinator-key-file={issued.key_file}",
    ]


async def test_a_tier_joins_and_doctor_reaches_the_coordinator(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ca = ClusterAuthority(tmp_path / "ca")
    async with coordinator_process(tmp_path, ca.coordinator_options()) as coordinator:
        at = f"--coordinator={coordinator.address}"
        tier = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "kvxfer.cli", "tier", "--capacity-bytes=1048576", "--agent-id=t0", at),
            *shown(ca, CertRole.TIER, "t0"),
            *("--token-file=/absent", f"--exit-with-parent={os.getpid()}"),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert tier.stdout is not None
            assert json.loads(await tier.stdout.readline())["agent_id"] == "t0"
            assert await watch(coordinator.address, ca.followed(CertRole.ROUTER, "r0")) == ["t0"]
            operator = shown(ca, CertRole.OPERATOR, "o0")
            assert await asyncio.to_thread(main, ["doctor", at, *operator]) == 0
            assert "accepts connections" in capfd.readouterr().out
            assert await asyncio.to_thread(main, ["doctor", at, "--timeout-s=0.5"]) == 1
        finally:
            with contextlib.suppress(ProcessLookupError):
                tier.terminate()
            await tier.wait()


def test_members_have_the_same_three_flags() -> None:
    three = {f"coordinator_{what}_file" for what in ("ca", "cert", "key")}
    for command in MEMBERS:
        assert three <= set(options_class(command).__dataclass_fields__)


@pytest.mark.parametrize("command", MEMBERS)
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--coordinator-cert-file=c"], "coordinator_cert_file and coordinator_ca_file go together"),
        (["--coordinator-ca-file=a"], "coordinator_cert_file and coordinator_ca_file go together"),
        (["--coordinator-key-file=k"], "coordinator_key_file needs coordinator_cert_file"),
    ],
)
def test_flags_that_lack_another_one_are_one_sentence(
    command: str, flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--capacity-bytes=1048576"] if command == "tier" else []
    assert main([command, "--check-config", "--coordinator=127.0.0.1:1", *more, *flags]) == 2
    assert capsys.readouterr().err == f"kvxfer: {sentence}\n"


def test_a_router_checks_its_files_before_it_starts(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = ClusterAuthority(tmp_path / "one"), ClusterAuthority(tmp_path / "two")
    flags = shown(one, CertRole.ROUTER, "r0")
    command = ["router", "--check-config", "--coordinator=127.0.0.1:1"]
    assert main([*command, *flags]) == 0
    capsys.readouterr()
    assert main([*command, f"--coordinator-ca-file={two.ca_file}", *flags[1:]]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"kvxfer: coordinator_cert_file: with coordinator_ca_file {two.ca_file} no peer believes ")
    assert said.count("\n") == 1
