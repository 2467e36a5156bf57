"""Over how many connections: each number is tried, the fastest is kept, and what has changed is found out."""

from __future__ import annotations

import pytest

from kvxfer.policy.striping import CHOICES, EVERY, GAIN, KEPT, MISSES_MAX, TRIES, Striping

NBYTES = 64 << 20


def use(striping: Striping, speeds: dict[int, float], posts: int) -> list[int]:
    """So many posts over a network of such speeds (bytes/s by connections); what each was spread over."""
    used = []
    for _ in range(posts):
        used.append(striping.choose())
        striping.measured(used[-1], used[-1], NBYTES, NBYTES / speeds[used[-1]])
    return used


@pytest.mark.parametrize(
    ("speeds", "best"),
    [
        ({1: 1e9, 2: 2e9, 4: 3.9e9}, 4),
        ({1: 4e9, 2: 3e9, 4: 2e9}, 1),
        ({1: 2e9, 2: 4e9, 4: 4.1e9}, 2),
        ({1: 4e9, 2: 4e9 * (GAIN - 0.01), 4: 4e9}, 1),
    ],
)
def test_the_fastest_is_kept(speeds: dict[int, float], best: int) -> None:
    striping = Striping()
    tries = len(CHOICES) * TRIES
    assert use(striping, speeds, tries) == [count for count in CHOICES for _ in range(TRIES)]
    assert striping.best == best
    later = use(striping, speeds, 4 * EVERY)
    assert later.count(best) == 4 * EVERY - 4
    assert set(later) == set(CHOICES), "the others are tried again"


def test_a_network_that_changes() -> None:
    striping = Striping()
    use(striping, {1: 5e9, 2: 5e9, 4: 5e9}, 40)
    assert striping.best == 1
    use(striping, {1: 1e9, 2: 2e9, 4: 4e9}, 2 * KEPT * EVERY)
    assert striping.best == 4


def test_one_lucky_post_does_not_decide() -> None:
    striping = Striping()
    speeds = {1: 4e9, 2: 4e9, 4: 4e9}
    use(striping, speeds, len(CHOICES) * TRIES)
    striping.measured(4, 4, NBYTES, NBYTES / 50e9)
    assert striping.best == 1


def test_a_post_over_fewer_than_it_was_to_counts_as_what_it_was() -> None:
    """Each number of connections has its own speed, and one more is up after each post that wanted more."""
    striping, up, wanted, speeds = Striping(), 1, [], {1: 1e9, 2: 2e9, 3: 3e9, 4: 4e9}
    for _ in range(3 * TRIES + 3):
        wanted.append(striping.choose())
        used = min(wanted[-1], up)
        striping.measured(wanted[-1], used, NBYTES, NBYTES / speeds[used])
        up = max(up, min(up + 1, wanted[-1]))
    assert wanted == [*[1] * TRIES, *[2] * (TRIES + 1), *[4] * (TRIES + 2)]
    assert striping.best == 4
    assert repr(striping) == "<Striping 1: 1.0 GB/s, 2: 2.0 GB/s, 4: 4.0 GB/s>"


def test_what_is_never_to_be_had_is_done_without() -> None:
    """Until it is tried again, now and then."""
    striping, speeds = Striping(), {1: 1e9, 2: 2e9}
    wanted = []
    for _ in range(4 * EVERY):
        wanted.append(striping.choose())
        used = min(wanted[-1], 2)
        striping.measured(wanted[-1], used, NBYTES, NBYTES / speeds[used])
    tries = 2 * TRIES + MISSES_MAX
    assert wanted[:tries] == [*[1] * TRIES, *[2] * TRIES, *[4] * MISSES_MAX]
    assert striping.best == 2
    assert wanted[tries:].count(2) >= len(wanted[tries:]) - 4


@pytest.mark.parametrize("parts", [{1: 3, 2: 3, 4: 4}, {1: 1, 2: 2, 4: 3}, {1: 1, 2: 1, 4: 1}, {1: 8, 2: 8, 4: 8}])
def test_posts_that_are_cut_otherwise_do_not_hold_it_up(parts: dict[int, int]) -> None:
    """Of so many parts for each number that was wanted: too few pieces, or lists too long for one frame."""
    striping = Striping()
    wanted = []
    for _ in range(len(CHOICES) * MISSES_MAX):
        wanted.append(striping.choose())
        striping.measured(wanted[-1], parts[wanted[-1]], NBYTES, NBYTES / 1e9)
    assert list(dict.fromkeys(wanted)) in ([1, 2, 4], [1, 2, 4, 1])
    assert striping.choose() == striping.best


@pytest.mark.parametrize(
    "wrong",
    [(1, 1, 0, 1.0), (1, 1, NBYTES, 0.0), (1, 1, NBYTES, float("inf")), (3, 3, NBYTES, 1.0), (3, 1, NBYTES, 1.0)],
)
def test_what_cannot_be_says_nothing(wrong: tuple[int, int, int, float]) -> None:
    striping = Striping()
    striping.measured(*wrong)
    assert striping.choose() == striping.best == 1
    assert repr(striping) == "<Striping nothing seen>"
