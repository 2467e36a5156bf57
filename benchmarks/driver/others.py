"""aiperf and guidellm against the same server: the CPU time of all their processes for 1,000 more requests.

Both take long to start, so each is run with two numbers of requests and the difference is what the requests cost.
"""

from __future__ import annotations

import json
import os
import pathlib
import resource
import subprocess
import tempfile
import time
from typing import Any

TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {f"w{number}": number for number in range(1000)}, "unk_token": "w0"},
}
"""One that needs no download: what the words of a prompt are makes no difference here."""
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1", "unk_token": "w0"}
RUN_S = 300.0


def command(name: str, path: str, url: str, rate: float, requests: int, folder: pathlib.Path) -> list[str]:
    tokenizer = folder / "tokenizer"
    if name == "aiperf":
        return [
            *(path, "profile", "--model=echo", f"--url={url}", "--endpoint-type=chat", "--streaming", "--ui=none"),
            *(f"--request-rate={rate}", f"--request-count={requests}", f"--tokenizer={tokenizer}"),
            *("--synthetic-input-tokens-mean=16", "--output-tokens-mean=32", "--use-server-token-count"),
            *("--no-gpu-telemetry", "--no-server-metrics", f"--artifact-dir={folder / str(requests)}"),
        ]
    return [
        *(path, "run", f"--backend=kind=openai_http,target={url},model=echo,request_format=/v1/chat/completions"),
        *(f"--profile=kind=poisson,rate={rate}", f"--constraint=kind=max_requests,count={requests}"),
        *(
            "--data=kind=synthetic_text,prompt_tokens=16,output_tokens=32",
            f"--tokenizer=kind=hf_auto,model={tokenizer}",
        ),
        *("--disable-console", "--output=kind=json,path=out.json"),
    ]


def cost(name: str, path: str, url: str, rate: float) -> dict[str, Any]:
    """Seconds for 1,000 requests, or the last lines of a run that failed."""
    counts, used = (int(rate * 10), int(rate * 30)), []
    for requests in counts:
        with tempfile.TemporaryDirectory() as name_of:
            folder = pathlib.Path(name_of)
            (folder / "tokenizer").mkdir()
            (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(TOKENIZER))
            (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(CONFIG))
            words = command(name, path, url, rate, requests, folder)
            environment = {**os.environ, "HOME": name_of, "HF_ENDPOINT": "http://127.0.0.1:9"}
            for offline in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
                environment.pop(offline, None)
            before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
            done = subprocess.run(words, capture_output=True, text=True, timeout=RUN_S, env=environment, cwd=folder)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            if done.returncode:
                return {"failed": (done.stdout + done.stderr)[-2000:]}
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            used.append((cpu_s, time.monotonic() - began_s))
    per_1000 = (used[1][0] - used[0][0]) / (counts[1] - counts[0]) * 1000
    return {"cpu_s_per_1000": per_1000, "start_s": used[0][1] - 10, "runs_s": [wall_s for _, wall_s in used]}


def shown(found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"failed: {found['failed']}"
    per_1000 = found["cpu_s_per_1000"]
    return f"{per_1000:.2f} CPU s/1,000, {1000 / per_1000:.0f} req/s a core; {found['start_s']:.0f} s besides the load"
