"""``kvxfer serve`` and ``kvxfer demo`` whole: real processes, a tiny model; what is printed works, nothing is left."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.support.cli.processes import is_running, wait_gone

pytestmark = pytest.mark.nightly

COMMAND = [sys.executable, "-P", "-m", "kvxfer.cli"]


@dataclasses.dataclass
class Served:
    """A running ``kvxfer serve``: its process, what it printed, and the processes it named."""

    process: subprocess.Popen[str]
    output: str
    pids: dict[str, int]
    errors: list[str]

    @property
    def url(self) -> str:
        match = re.search(r"at (http://127\.0\.0\.1:\d+)/v1", self.output)
        assert match
        return match.group(1)

    def wait_said(self, text: str, timeout_s: float = 30.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not any(text in line for line in self.errors):
            assert time.monotonic() < deadline_s, "".join(self.errors)
            time.sleep(0.05)


@pytest.fixture
def served() -> Iterator[Served]:
    process = subprocess.Popen(
        [*COMMAND, "serve", "--model=tiny", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    errors: list[str] = []
    pipe = process.stderr
    reader = threading.Thread(target=lambda: errors.extend(iter(pipe.readline, "")), daemon=True)
    reader.start()
    output = ""
    try:
        for line in process.stdout:
            output += line
            if line.startswith("Ctrl-C"):
                break
        else:
            process.wait(timeout=30)
            reader.join(timeout=30)
            pytest.fail(f"serve ended with {process.returncode}:\n{output}\n{''.join(errors)}")
        pids = {name: int(pid) for name, pid in re.findall(r"^  (\S+) .*process (\d+)\)$", output, re.MULTILINE)}
        yield Served(process, output, pids, errors)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0, "".join(errors)
        wait_gone(list(pids.values()))
    finally:
        process.kill()
        process.wait()
        reader.join(timeout=30)
        process.stdout.close()
        pipe.close()


def chat(served: Served) -> httpx.Response:
    model = httpx.get(f"{served.url}/v1/models", timeout=30, trust_env=False).json()["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "the quick brown fox"}], "max_tokens": 8}
    body["temperature"] = 0
    return httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)


def test_printed_curl_command_works(served: Served) -> None:
    assert set(served.pids) == {"coordinator", "prefill-0", "decode-0", "router"}
    lines = [line.strip() for line in served.output.splitlines()]
    words = shlex.split(next(line for line in lines if line.startswith("curl ")))
    url, body = words[2], words[words.index("-d") + 1]
    assert json.loads(body)["stream"] is True
    with httpx.stream(
        "POST", url, content=body, headers={"Content-Type": "application/json"}, timeout=60, trust_env=False
    ) as answer:
        assert answer.status_code == 200
        assert answer.read().decode().rstrip().endswith("data: [DONE]")

    first = lines.index("from openai import OpenAI")
    source = "\n".join(lines[first : first + 3])
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_losing_a_process_is_said_and_survived(served: Served) -> None:
    before = chat(served)
    assert before.headers["x-kvxfer-prefill"] == "remote"
    os.kill(served.pids["prefill-0"], signal.SIGKILL)
    served.wait_said("lost prefill-0")
    served.wait_said("SIGKILL")
    after = chat(served)
    assert after.status_code == 200, after.text
    assert after.json()["choices"][0]["message"] == before.json()["choices"][0]["message"]
    assert all(is_running(pid) for name, pid in served.pids.items() if name != "prefill-0")


def test_killed_supervisor_leaves_nothing(served: Served) -> None:
    pids = list(served.pids.values())
    assert all(map(is_running, pids))
    served.process.kill()
    wait_gone(pids)
    served.process.returncode = 0


def test_port_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = [*COMMAND, "serve", "--model=tiny", f"--port={port}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"kvxfer: cannot listen on 127.0.0.1:{port}: ")
    assert done.stdout == "", "nothing was started"


def test_interrupted_while_starting() -> None:
    process = subprocess.Popen(
        [*COMMAND, "serve", "--model=tiny", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pids = []
    for line in process.stdout:
        if match := re.search(r"process (\d+)\)$", line.rstrip()):
            pids.append(int(match.group(1)))
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    wait_gone(pids)


def test_missing_model() -> None:
    done = subprocess.run([*COMMAND, "serve", "--model=nowhere"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("kvxfer: model 'nowhere'")


def test_demo() -> None:
    command = [*COMMAND, "demo", "--model=tiny", "--max-tokens=16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens are identical" in done.stdout
    for row in ("prompt", "prefill", "moved", "lane", "first token", "answer"):
        assert re.search(rf"^  {row} ", done.stdout, re.MULTILINE), done.stdout
    pids = [int(pid) for pid in re.findall(r"process (\d+)\)", done.stdout)]
    assert len(pids) == 4
    wait_gone(pids)
