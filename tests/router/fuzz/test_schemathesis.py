"""Schemathesis over the document that the router serves, hot routes included."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from tests.support.one_process import one_process

PROGRAM = pathlib.Path(sys.executable).with_name("schemathesis")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
]
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("both",)])
def test_the_served_document_says_what_the_router_answers(
    roles: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """``/ready`` is left out: it says 503 of a model that is not there."""
    with one_process(*roles, failures_to_eject=1000) as there:
        command = [
            *(str(PROGRAM), "run", f"{there.url}/openapi.json", f"--checks={CHECKS}", "--no-color", "--warnings=off"),
            *("--max-examples=100", "--seed=1", "--exclude-path=/ready", "--phases=examples,coverage,fuzzing"),
            *("--generation-database=none", "--suppress-health-check=all", "--continue-on-failure"),
        ]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    assert [record for record in caplog.records if record.exc_info] == []
