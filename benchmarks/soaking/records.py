"""What a soak leaves, each thing a record: questions, requests, faults, samples of processes. Decides nothing."""

from __future__ import annotations

import dataclasses
import math

AFTER_S = 2.0
"""A failure so soon after a fault, when all parts have seen each other again, is still the fault's."""
TOO_LONG = "answer_too_long"
"""What a client calls an answer that it gave up after the longest time that one may take: nobody told it why."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt, and the tokens that are right."""

    number: int
    prompt: tuple[int, ...]
    right: tuple[int, ...]


@dataclasses.dataclass
class Attempt:
    """``name`` of its failure; empty: it was answered. ``is_named``: the router said what failed, or the client can see
    it (its router is not there). ``had_byte``: something of the answer had come; ``had_token``: a token of it. The
    agents are those that the router's account names; empty where none came."""

    at_s: float
    router: str
    name: str = ""
    had_byte: bool = False
    is_named: bool = True
    ended_s: float = 0.0
    said: str = ""
    had_token: bool = False
    prefill_agent: str = ""
    decode_agent: str = ""


@dataclasses.dataclass
class Asked:
    """One request. ``outcome``: right, wrong, cut (failed after its first byte), failed (no router answered), or left
    (the client lost interest). ``prefill`` is where the router meant to have the prompt computed, ``transfer`` where
    the decode worker says that it was."""

    number: int
    question: int
    at_s: float
    is_stream: bool
    attempts: list[Attempt] = dataclasses.field(default_factory=list)
    outcome: str = ""
    first_s: float = 0.0
    took_s: float = 0.0
    prefill: str = ""
    transfer: str = ""
    wrong: str = ""


@dataclasses.dataclass
class HappenedFault:
    """``whole_s``: so long after its end all parts saw each other again; None: never."""

    kind: str
    victim: str
    peer: str
    amount: float
    began_s: float
    ended_s: float
    whole_s: float | None = None

    def covers(self, start_s: float, end_s: float) -> bool:
        """Whether it was there at some time between, or had been over for less than AFTER_S."""
        over_s = math.inf if self.whole_s is None else self.ended_s + self.whole_s
        return self.began_s <= end_s and start_s <= over_s + AFTER_S


@dataclasses.dataclass
class Samples:
    """Of one process, from its start on. ``memory_mb`` is its resident memory without pages of files and of shared
    memory: those of the pool come with the first use of each block, and are ``shared_mb``."""

    part: str
    role: str
    pid: int
    at_s: list[float] = dataclasses.field(default_factory=list)
    memory_mb: list[float] = dataclasses.field(default_factory=list)
    descriptors: list[int] = dataclasses.field(default_factory=list)
    threads: list[int] = dataclasses.field(default_factory=list)
    shared_mb: list[float] = dataclasses.field(default_factory=list)

    @property
    def lived_s(self) -> float:
        return self.at_s[-1] - self.at_s[0] if self.at_s else 0.0
