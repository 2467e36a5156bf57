"""A run of the load driver as a process: ``python -m tests.support.load_child URL COUNT GAP_S [PROCESSES]``.

Writes one line ``began`` with the pids of its sending processes, then each record, then a line with the result.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import sys

from kvxfer.load.drive.start import DriveProgress, drive
from kvxfer.load.options import DriveOptions, TargetOptions
from kvxfer.load.record import MeasuredRequest
from tests.support.load_server import NumberBody, workload_of


def main(url: str, count: str, gap_s: str, processes: str = "1") -> None:
    began: list[bool] = []

    def begin() -> None:
        if not began:
            began.append(True)
            print(json.dumps({"began": [child.pid for child in multiprocessing.active_children()]}), flush=True)

    def heard(progress: DriveProgress) -> None:
        if progress.elapsed_s > 0:
            begin()

    def record(one: MeasuredRequest) -> None:
        begin()
        print(one.to_json(), flush=True)

    result = drive(
        workload_of([place * float(gap_s) for place in range(int(count))]),
        NumberBody(),
        TargetOptions(url=url),
        DriveOptions(processes=int(processes), drain_s=20),
        run="child",
        on_record=record,
        on_progress=heard,
    )
    print(json.dumps(dataclasses.asdict(result)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
