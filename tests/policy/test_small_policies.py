"""Backoff, admission, and whether a remote prefill pays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ConfigError, InvalidArgumentError, OverloadedError
from kvxfer.policy.admit import Admission, AdmitOptions, admit, refusal
from kvxfer.policy.backoff import Backoff
from kvxfer.policy.disagg import DisaggOptions, DisaggReason, PrefillAt, decide_prefill, estimate_tokens


@given(st.integers(1, 10_000), st.floats(0, 1), st.floats(0, 1))
def test_a_delay_stays_between_its_bounds(failures: int, random: float, jitter: float) -> None:
    backoff = Backoff(base_s=0.1, cap_s=5.0, jitter=jitter)
    full = min(5.0, 0.1 * 2.0 ** min(failures - 1, 62))
    assert full * (1 - jitter) - 1e-12 <= backoff.delay_s(failures, random=random) <= full


def test_backoff_refuses_nonsense() -> None:
    with pytest.raises(ConfigError):
        Backoff(base_s=2.0, cap_s=1.0)
    with pytest.raises(ConfigError):
        Backoff(jitter=2.0)
    with pytest.raises(InvalidArgumentError):
        Backoff().delay_s(0, random=0.5)
    with pytest.raises(InvalidArgumentError):
        Backoff().delay_s(1, random=1.5)


def test_admission() -> None:
    options = AdmitOptions(max_inflight=2)
    assert admit(1, is_draining=False, options=options) is Admission.ADMITTED
    assert admit(2, is_draining=False, options=options) is Admission.FULL
    assert admit(0, is_draining=True, options=options) is Admission.DRAINING
    assert isinstance(refusal(Admission.FULL, options), OverloadedError)
    assert "max_inflight 2" in str(refusal(Admission.FULL, options))
    assert "stopping" in str(refusal(Admission.DRAINING, options))


def test_remote_prefill_is_always_wanted_by_default_and_long_prompts_otherwise() -> None:
    assert decide_prefill(0, DisaggOptions()).at is PrefillAt.REMOTE
    options = DisaggOptions(min_remote_prefill_tokens=100)
    assert decide_prefill(99, options) == (PrefillAt.LOCAL, DisaggReason.SHORT_PROMPT)
    assert decide_prefill(100, options) == (PrefillAt.REMOTE, DisaggReason.WORTH_IT)
    assert decide_prefill(1, DisaggOptions(), is_exact=True) == (PrefillAt.LOCAL, DisaggReason.NOTHING_TO_MOVE)


def test_an_estimate_of_tokens_is_never_zero_for_text() -> None:
    assert [estimate_tokens(count) for count in (0, 1, 4, 5)] == [0, 1, 1, 2]
