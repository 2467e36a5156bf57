"""The same options give the same bytes, in any process and whatever PYTHONHASHSEED is."""

from __future__ import annotations

import pathlib
import subprocess
import sys

from tests.support.child import environment

TRACES = pathlib.Path(__file__).parent / "traces"
PROGRAM = """
import hashlib, json, sys
from kvxfer.load.offered import body_maker, workload_from
from kvxfer.load.options import ApiKind, ArrivalKind, TargetOptions, WorkloadOptions
from kvxfer.workload.request import DispatchMode

folder = sys.argv[1]
cases = {kind.value: {"arrival": kind} for kind in ArrivalKind if kind is not ArrivalKind.TRACE}
cases["ramp"]["end_rate"] = 9.0
cases["sessions"] = {"turns": 3, "shared_prefix_tokens": 77, "length_spread": 0.4}
cases["stamped"] = {"turns": 3, "session_mode": DispatchMode.TIMESTAMP}
cases["trace"] = {"trace": folder + "/mooncake_conversation_200.jsonl", "salt": "b"}
cases["azure"] = {"trace": folder + "/azure_2023_conversation_200.csv", "arrival": ArrivalKind.GAMMA}
found = {}
for name, case in cases.items():
    for api in ApiKind:
        options = WorkloadOptions(**{"requests": 60, "seed": 5, **case})
        workload = workload_from(options)
        maker = body_maker(TargetOptions(api=api), options, workload, "m")
        digest = hashlib.sha256()
        for request in workload.requests:
            digest.update(repr((request.due_s, request.think_s, request.session)).encode() + maker.body(request))
        found[f"{name} {api.value}"] = digest.hexdigest()
print(json.dumps(found))
"""


def digests(hash_seed: str) -> str:
    command = [sys.executable, "-c", PROGRAM, str(TRACES)]
    made = subprocess.run(
        command,
        env={**environment(), "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return made.stdout


def test_two_processes_with_other_hash_seeds_make_the_same_bytes() -> None:
    one, other = digests("1"), digests("4242")
    assert one == other
    assert len(set(one.split(", "))) == 16, "two cases make the same bytes"
