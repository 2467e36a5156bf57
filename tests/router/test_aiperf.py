"""NVIDIA's `aiperf`, unchanged, against a router and mock engines: every request answered, none an error.

It has an environment of its own, `build/aiperf-venv`, which `make nightly-aiperf` makes.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

import pytest

from tests.support.one_process import MODEL, one_process

AIPERF = pathlib.Path(__file__).resolve().parents[2] / "build" / "aiperf-venv" / "bin"

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.checkout,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (AIPERF / "aiperf").exists(), reason="build/aiperf-venv is not there: make nightly-aiperf"),
]
MAKE_TOKENIZER = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=made, eos_token=letters[0], bos_token=letters[0]).save_pretrained(sys.argv[1])
"""
REQUESTS = 100


@pytest.mark.parametrize("stream", [True, False])
def test_every_request_of_aiperf_is_answered(stream: bool, tmp_path: pathlib.Path) -> None:
    tokenizer, out = tmp_path / "tokenizer", tmp_path / "out"
    subprocess.run([AIPERF / "python", "-c", MAKE_TOKENIZER, str(tokenizer)], check=True, timeout=120)
    with one_process("prefill", "decode", "decode") as there:
        command = [
            *(str(AIPERF / "aiperf"), "profile", f"--model={MODEL}", f"--url={there.url}", "--endpoint-type=chat"),
            *(f"--tokenizer={tokenizer}", f"--request-count={REQUESTS}", "--concurrency=8", "--random-seed=1"),
            *("--synthetic-input-tokens-mean=200", "--output-tokens-mean=16", f"--artifact-dir={out}", "--ui=none"),
            *(["--streaming"] if stream else []),
        ]
        # Told to be offline, it takes a tokenizer's directory for the name of one that it should have downloaded.
        online = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
        environment = {**online, "HF_ENDPOINT": "http://127.0.0.1:9", "HOME": str(tmp_path)}
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
        assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    [exported] = out.rglob("profile_export_aiperf.json")
    said = json.loads(exported.read_text())
    assert int(said["request_count"]["avg"]) == REQUESTS
    assert not said.get("error_summary")
