"""Jamba, of which vLLM has no kernel for CPU: what moves of its prompts, over memory that vLLM lays out for it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

from tests.support.vllm.engines import CACHE, PYTHON, ROOT

SCRIPT = ROOT / "tests" / "support" / "vllm" / "jamba_plan.py"


def test_of_each_prompt_the_states_and_every_block_of_attention_move(tmp_path: pathlib.Path) -> None:
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(CACHE), "PYTHONPATH": str(ROOT)}
    command = [str(PYTHON), str(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    kinds = sorted((kind, layers) for kind, _, layers in said["groups"])
    assert kinds == [("full", 1), *[("state", 1)] * 7]
    assert said["pages"] > 100
