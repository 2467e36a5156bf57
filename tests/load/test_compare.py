"""What the points of a sweep are worth."""

from __future__ import annotations

from kvxfer.load.compare import ComparedPoint, Comparison
from kvxfer.load.conclude import judge
from kvxfer.load.options import GoalOptions
from kvxfer.load.record import MeasuredRequest
from kvxfer.load.run import LoadRun
from kvxfer.load.sweep import PointResult, SweepResult
from kvxfer.load.sweep_points import SweepPoint

GOAL = GoalOptions(goodput="ttft:100", attainment=0.9)


def compared(good: int, due: int) -> ComparedPoint:
    """Of a run of one second."""
    records = [
        MeasuredRequest(
            "run", number, str(number), 0.5, 1, 1, sent_s=0.5, first_s=first_s, last_s=first_s, end_s=first_s
        )
        for number in range(due)
        for first_s in [0.55 if number < good else 0.9]
    ]
    return ComparedPoint([judge(LoadRun("run", "native", 0.0, (0.0, 1.0), records=records), GOAL)])


def comparison(**points: ComparedPoint) -> Comparison:
    results = [PointResult(SweepPoint(int(name[0]), int(name[2]))) for name in points]
    return Comparison(SweepResult(results), points)


def test_a_point_that_met_its_target_is_better_than_one_that_did_not() -> None:
    made = comparison(**{"1P1D": compared(50, 100), "2P1D": compared(30, 30), "1P3D": compared(36, 36)})
    assert made.best is not None
    assert made.best.point.name == "2P1D"


def test_where_none_met_its_target_the_most_goodput_per_worker_wins() -> None:
    made = comparison(**{"1P1D": compared(50, 100), "2P1D": compared(60, 100)})
    assert made.best is not None
    assert made.best.point.name == "1P1D"


def test_points_that_failed_are_said_and_never_the_best() -> None:
    made = comparison(**{"1P1D": compared(50, 50), "2P1D": compared(30, 30)})
    made.result.points[0].failure = "lost decode-0"
    assert made.best is made.result.points[1]
    [verdict] = made.verdicts()
    assert (verdict.is_failure, verdict.sentence) == (True, "1P1D: lost decode-0.")
    assert [point["goodput_per_s"] for point in made.to_json()["points"]] == [50.0, 30.0]
