"""Whether one more request may come in. Counts only: it never knows what a request costs or its sender."""

from __future__ import annotations

import dataclasses
import enum

from kvxfer.errors import OverloadedError


class Admission(enum.StrEnum):
    """What became of a request at the door."""

    ADMITTED = "admitted"
    FULL = "full"
    DRAINING = "draining"


@dataclasses.dataclass(frozen=True)
class AdmitOptions:
    """``max_inflight`` requests at once; the refused are asked to come back after ``retry_after_s`` seconds."""

    max_inflight: int = 1024
    retry_after_s: int = 1


def admit(inflight: int, *, is_draining: bool, options: AdmitOptions) -> Admission:
    """Judge one more request while ``inflight`` are being served."""
    if is_draining:
        return Admission.DRAINING
    return Admission.FULL if inflight >= options.max_inflight else Admission.ADMITTED


def refusal(admission: Admission, options: AdmitOptions) -> OverloadedError:
    """The error that says why the door stayed shut, naming the bound."""
    if admission is Admission.DRAINING:
        return OverloadedError("this server is stopping and takes no new requests")
    return OverloadedError(f"max_inflight {options.max_inflight} requests are being served already")
