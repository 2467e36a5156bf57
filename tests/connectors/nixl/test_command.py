"""``kvxfer nixl -- COMMAND``: whatever a program imports as NIXL is kvxfer, and everything else stays its own."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import nixl, nixl._api, nixl._bindings, nixl._utils, nixl.logging, nixl_cu12._api, nixl_cu13._bindings
from nixl._api import nixl_agent, nixl_agent_config
from nixl_cu12._bindings import nixlNotFoundError, nixlXferDList, DRAM_SEG
assert nixl_agent is nixl.nixl_agent is nixl_cu12._api.nixl_agent
assert nixl_agent.__module__ == "kvxfer.connectors.nixl.api"
assert nixl._bindings.nixlNotFoundError is nixlNotFoundError is nixl.nixlNotFoundError
agent = nixl_agent("a")
print(agent.get_plugin_list())
"""


def run(*words: str, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvxfer.cli", "nixl", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environ})
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_a_program_that_imports_nixl_runs_on_kvxfer() -> None:
    assert "UCX" in run("--", sys.executable, "-c", PROGRAM).stdout


def test_the_real_package_is_hidden(tmp_path: pathlib.Path) -> None:
    for name in ("nixl", "nixl_cu12"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the real one')")
    run("--", sys.executable, "-c", PROGRAM, PYTHONPATH=str(tmp_path))


def test_the_programs_own_paths_and_sitecustomize_stay(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.customized = True")
    (tmp_path / "helper.py").write_text("value = 3")
    source = "import nixl, helper; print(customized, helper.value)"
    assert run("--", sys.executable, "-c", source, PYTHONPATH=str(tmp_path)).stdout.split() == ["True", "3"]


def test_children_inherit_it() -> None:
    source = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {PROGRAM!r}], check=True)"
    run("--", sys.executable, "-c", source)


def test_exit_codes_and_arguments_are_the_programs() -> None:
    done = run("--", sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(7)", "--host", "x", code=7)
    assert done.stdout.strip() == "['--host', 'x']"
    run("--", "no-such-program-at-all", code=127)
    assert "needs a command" in run(code=2).stderr
    assert "needs a command" in run("--", code=2).stderr


def test_flags_are_for_the_programs_agents() -> None:
    source = "import os; print(os.environ['KVXFER_NIXL_HOST'], os.environ['KVXFER_NIXL_INSECURE'])"
    done = run("--host", "10.1.2.3", "--insecure", "--", sys.executable, "-c", source)
    assert done.stdout.split() == ["10.1.2.3", "1"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals_reach_the_program(number: signal.Signals) -> None:
    source = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL); print('up', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-m", "kvxfer.cli", "nixl", "--", sys.executable, "-c", source]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        assert process.wait(30) == -number


def test_without_kvxfer_the_reason_is_named(tmp_path: pathlib.Path) -> None:
    import kvxfer.connectors

    shims = pathlib.Path(kvxfer.connectors.__file__).parent / "nixl" / "shims"
    source = "import sys; sys.modules['kvxfer'] = None\nimport nixl"
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(shims)}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert "kvxfer is not installed for the Python that runs it" in done.stderr
