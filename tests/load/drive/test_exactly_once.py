"""Whatever the server does and whenever the run is stopped: each planned request has exactly one record, in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvxfer.load.drive.start import DriveProgress
from kvxfer.workload.request import DispatchMode, Workload, WorkloadRequest
from tests.support.load_server import (
    CLOSE,
    LAST_CHUNK,
    RESET,
    STREAM_HEAD,
    AskedOf,
    Step,
    chunk,
    driven,
    plain,
    scripted,
    sse,
    stream,
    token,
    usage,
)

pytestmark = pytest.mark.deep
REQUESTS = 200


def wild(seed: int) -> Workload:
    rng = np.random.default_rng(seed)
    turns: dict[int, int] = {}
    requests = []
    for number in range(REQUESTS):
        session = int(rng.integers(20)) if rng.random() < 0.6 else None
        turn = 0 if session is None else turns.get(session, 0)
        if session is not None:
            turns[session] = turn + 1
        due_s = None if turn and rng.random() < 0.5 else number * 0.005
        requests.append(WorkloadRequest(number, 5, 2, due_s, float(rng.choice([0, 0.02])), session, turn))
    return Workload("wild", requests, mode=list(DispatchMode)[seed % 2])


@pytest.mark.parametrize("seed", range(6))
def test_one_record_each(seed: int) -> None:
    never = threading.Event()
    stop = threading.Event()
    rng = np.random.default_rng(seed)
    kinds = rng.choice(10, REQUESTS, p=[0.5, 0.1, *[0.05] * 8])
    stop_after = int(rng.integers(20, 2 * REQUESTS))

    def script(asked: AskedOf) -> Iterator[Step]:
        whole = stream(token("a"), token("b"), usage(2))
        cut = int(kinds[(asked.number * 7) % REQUESTS]) * 20 + 1
        answers: list[list[Step]] = [
            [whole],
            [whole[:cut], whole[cut:]],
            [whole[:cut], CLOSE],
            [whole[:cut], RESET],
            [CLOSE],
            [RESET],
            [whole[:cut], never],
            [plain(503, {"error": {"code": "overloaded"}})],
            [whole, CLOSE],
            [STREAM_HEAD, chunk(sse(b"nonsense")), LAST_CHUNK],
        ]
        yield from answers[kinds[asked.number]]

    def heard(progress: DriveProgress) -> None:
        if progress.ended >= stop_after:
            stop.set()

    with scripted(script) as server:
        options = {"processes": 1 + seed % 2, "connections_max": 30, "timeout_s": 1.0, "drain_s": 2.0}
        result, records = driven(server.url, wild(seed), stop=stop, on_progress=heard, **options)
        never.set()
    assert result.ended == ("interrupted" if stop.is_set() else "complete")
    for record in records:
        assert record.is_good or record.error
        times = [record.sent_s, record.first_s, record.last_s, record.end_s]
        known = [time_s for time_s in times if time_s is not None]
        assert known == sorted(known)
        assert not known or record.due_s <= known[0]
        assert (record.error == "not_sent") == (record.end_s is None)
