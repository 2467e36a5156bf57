"""A stand-in for aiperf's command: reads the settings and rows that the driver wrote, sends nothing, and writes records
as aiperf writes them. ``FAKE_AIPERF`` says what it does instead: ``crash``, ``hang`` (no record, and SIGINT means
nothing), ``half`` (half of the records, then it waits to be told to stop), ``garbage``.

    python -m tests.support.load_fake_aiperf profile --config FILE
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
import time
from typing import Any

BEGAN_NS = 1_790_000_000_000_000_000
LATE_NS = 2_000_000


def record(number: int, row: dict[str, Any], turn: int) -> dict[str, Any]:
    """It is issued 1 ms and sent 2 ms after it was due; tokens come after 200, 220 and 240 ms."""
    start_ns = BEGAN_NS + round(row.get("timestamp", 1000.0 * number) * 1e6) + LATE_NS
    metadata = {
        "session_num": number,
        "x_request_id": f"id-{number}",
        "conversation_id": row["session_id"],
        "turn_index": turn,
        "credit_issued_ns": start_ns - LATE_NS // 2,
        "request_start_ns": start_ns,
        "request_end_ns": start_ns + 240_000_000,
        "benchmark_phase": "profiling",
    }
    metrics = {
        "time_to_first_token": {"value": 200.0, "unit": "ms"},
        "request_latency": {"value": 240.0, "unit": "ms"},
        "inter_chunk_latency": {"value": [20.0, 20.0], "unit": "ms"},
        "usage_prompt_tokens": {"value": 7, "unit": "tokens"},
        "usage_completion_tokens": {"value": 3, "unit": "tokens"},
    }
    return {"metadata": metadata, "metrics": metrics}


def main() -> int:
    if "--version" in sys.argv:
        print(os.environ.get("FAKE_AIPERF_VERSION", "0.13.0"))
        return 0
    what = os.environ.get("FAKE_AIPERF", "")
    if what == "crash":
        print("│ Error: the dataset is no good │\n")
        return 3
    if what == "hang":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(600)
    settings = json.loads(pathlib.Path(sys.argv[sys.argv.index("--config") + 1]).read_text())["benchmark"]
    results = pathlib.Path(settings["artifacts"]["dir"])
    results.mkdir(parents=True)
    rows = [json.loads(line) for line in pathlib.Path(settings["dataset"]["path"]).read_text().splitlines()]
    turns: dict[str, int] = {}
    with (results / "profile_export.jsonl").open("w") as file:
        for number, row in enumerate(rows[: len(rows) // 2] if what == "half" else rows):
            turn = turns[row["session_id"]] = turns.get(row["session_id"], -1) + 1
            print(json.dumps(record(number, row, turn), separators=(",", ":")), file=file, flush=True)
        if what == "garbage":
            print("{}\n{}", file=file)
    if what == "half":
        signal.sigwait({signal.SIGINT})
    return 0


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT} if os.environ.get("FAKE_AIPERF") == "half" else set())
    sys.exit(main())
