"""What ``kvxfer load`` prints of a run."""

from __future__ import annotations

from kvxfer.cli.load_shown import run_table
from kvxfer.load.judge import summarize
from tests.support.load_records import answered, run_of


def test_the_target_is_printed_as_it_was_given() -> None:
    assert "asked for: 99.5%" in run_table(summarize(run_of([answered(0, 0.0)]), None, 0.995))


def test_of_no_request_no_attainment_is_told() -> None:
    said = run_table(summarize(run_of([]), None, 0.9))
    assert "0 due" in said
    assert "attainment" not in said
    assert "p50" not in said


def test_where_no_account_came_that_is_said() -> None:
    said = run_table(summarize(run_of([answered(0, 0.0)]), None, 0.9))
    assert "known of none of 1 whole answers" in said
