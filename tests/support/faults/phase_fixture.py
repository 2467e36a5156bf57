"""One source in another process, and one reader here for every phase that a pull can be in, each behind a proxy of its
own: brings all of them to their phase, and knows what each must look like there.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable
from typing import Any

from tests.support.faults.fault_proxy import DATA, HELLO, VERDICT
from tests.support.faults.parties import POISON, Party
from tests.support.faults.remote import Remote

BLOCKS = 8
"""Of one pull."""
BLOCK_BYTES = 4096
BYTES = BLOCKS * BLOCK_BYTES
STALL_S, RECONNECT_S = 0.5, 1.0
PATIENT_S = 30.0
"""To reconnect in, where a test does not wait for it to be over: a busy machine must not be taken for a lost peer."""
SILENCE_S = 2 * STALL_S + RECONNECT_S
"""By then a peer that says nothing is gone."""
MARGIN_S = 4.0
"""What a busy machine may add to a bound."""
PAINT = 0x55
SEED = 11


@dataclasses.dataclass(frozen=True)
class Phase:
    """``ready`` of BLOCKS blocks are announced (None: there is no grant yet); ``rule`` is what the proxy holds."""

    name: str
    state: str
    done: int = 0
    ready: int | None = BLOCKS
    rule: tuple[str, int, int] | None = None


CONNECTING = Phase("connecting", "CONNECTING", rule=("from", HELLO, 0))
STEPS = (
    Phase("waiting", "WAITING", ready=None),
    Phase("early", "READING", 1, ready=1),
    Phase("middle", "READING", BLOCKS // 2, ready=BLOCKS // 2),
    Phase("last", "READING", BLOCKS - 1, ready=BLOCKS - 1),
)
CONFIRMING = Phase("confirming", "CONFIRMING", BLOCKS, rule=("from", VERDICT, 0))
BYTEWISE = tuple(
    Phase(f"byte-{count}", "READING", rule=("from", DATA, count)) for count in (1, BYTES // 2 + 7, BYTES - 1)
)


def phases_of(lane: str) -> tuple[Phase, ...]:
    bytewise = BYTEWISE if lane in ("unix", "stream") else ()
    return (*STEPS, *bytewise, CONFIRMING, CONNECTING)


class PhaseFixture:
    """Pulls of all phases at once. ``make_source`` and ``make_reader``: of its name and Party's options, a party."""

    def __init__(
        self,
        lane: str,
        reconnect_s: float,
        *,
        make_source: Callable[..., Any] = Remote,
        make_reader: Callable[..., Any] = Party,
    ) -> None:
        self.lane, self.reconnect_s = lane, reconnect_s
        self._make_source = make_source
        self.phases = phases_of(lane)
        options: dict[str, Any] = {"stall_s": STALL_S, "reconnect_s": reconnect_s, "block_bytes": BLOCK_BYTES}
        self._options: dict[str, Any] = {**options, "blocks": BLOCKS * (len(self.phases) + 1)}
        self.readers: dict[Phase, Any] = {
            phase: make_reader(phase.name, [lane], **options, blocks=3 * BLOCKS) for phase in self.phases
        }
        self.ids: dict[Phase, str] = {}
        self.is_clean = True
        self.source = self._open_source()

    def _open_source(self) -> Any:
        source = self._make_source("source", [self.lane], **self._options)
        source.fill(SEED)
        for phase, reader in self.readers.items():
            source.add_peer(reader.metadata())
            self._proxy_of(source, phase)
        return source

    def _proxy_of(self, source: Any, phase: Phase) -> None:
        proxy = source.open_proxy()
        assert proxy == self.number(phase)
        self.readers[phase].add_peer(source.metadata(proxy))

    def replace_source(self) -> None:
        """Another incarnation of it, and all readers know."""
        for reader in self.readers.values():
            reader.peer_dead("source")
        self.source.kill()
        self.source = self._open_source()

    def number(self, phase: Phase) -> int:
        return self.phases.index(phase)

    def proxy(self, phase: Phase, verb: str, *arguments: Any) -> Any:
        return self.source.proxy(self.number(phase), verb, *arguments)

    def own_blocks(self, phase: Phase) -> list[int]:
        """The source's blocks of that phase's pull; the reader's are 0 to BLOCKS."""
        first = self.number(phase) * BLOCKS
        return list(range(first, first + BLOCKS))

    def begin(self, deadline_s: float = 60.0, ttl_s: float = 30.0) -> float:
        """Every pull is in its phase; returns when the first was asked for (time.monotonic)."""
        began_s = time.monotonic()
        self.is_clean = False
        for phase, reader in self.readers.items():
            reader.paint(POISON)
            self.ids[phase] = transfer = secrets.token_hex(16)
            if phase.rule is not None:
                if phase is CONNECTING:
                    self.proxy(phase, "reset")
                    assert self.proxy(phase, "wait_empty")
                self.proxy(phase, "stop_at", *phase.rule)
            if phase.ready is not None:
                self.source.grant(transfer, self.own_blocks(phase), phase.ready, ttl_s, phase.name)
            reader.pull(transfer, "source", list(range(BLOCKS)), deadline_s)
        for phase in self.phases:
            if phase.rule is not None:
                assert self.proxy(phase, "wait_stopped"), f"{phase.name}: the proxy held nothing"
        for phase, reader in reversed(self.readers.items()):  # the last one, CONNECTING, may soon give up
            assert reader.wait_state(self.ids[phase], phase.state, phase.done), (
                f"{phase.name}: {reader.state(self.ids[phase])}, not {phase.state} {phase.done}"
            )
        return began_s

    def go_on(self) -> None:
        """Whatever the pulls still miss to be committed."""
        for phase in self.phases:
            if phase.ready is None:
                self.source.grant(self.ids[phase], self.own_blocks(phase), BLOCKS)
            elif phase.ready < BLOCKS:
                self.source.ready(self.ids[phase], BLOCKS, True)

    def expect(self, outcome: str, by_s: float, *, but: dict[Phase, str] | None = None) -> None:
        """Every pull ends with ``outcome`` (those of ``but`` with theirs), all by then, and gives its blocks back.

        The blocks of those that did not commit are painted at once: from then on they are another owner's.
        """
        for phase, reader in self.readers.items():
            wanted = (but or {}).get(phase, outcome)
            left_s = max(by_s + MARGIN_S - time.monotonic(), 0.0)
            got = reader.outcome(self.ids[phase], left_s)
            assert got == wanted, f"{phase.name}: {got or 'not over'}, not {wanted}: {reader.why(self.ids[phase])}"
            if wanted == "committed":
                self.expect_content(phase)
            else:
                reader.paint(PAINT, list(range(BLOCKS)))

    def expect_content(self, phase: Phase) -> None:
        reader, offset = self.readers[phase], self.own_blocks(phase)[0] * BLOCK_BYTES
        assert reader.is_filled(SEED, list(range(BLOCKS)), offset=offset), f"{phase.name}: committed with other bytes"
        beside = reader.is_painted(POISON, list(range(BLOCKS, 3 * BLOCKS)))
        assert beside, f"{phase.name}: bytes landed beside the blocks"

    def look_again(self) -> None:
        """A pull on every session that comes to its end has what was under way before it behind it."""
        for reader in self.readers.values():
            transfer = secrets.token_hex(16)
            spare = len(self.phases) * BLOCKS
            self.source.grant(transfer, [spare], 1)
            reader.pull(transfer, "source", [2 * BLOCKS])
            assert reader.outcome(transfer) == "committed", reader.why(transfer)
        self.expect_paint()
        self.expect_idle()

    def expect_paint(self) -> None:
        for phase, reader in self.readers.items():
            assert reader.is_painted(PAINT, list(range(BLOCKS))), (
                f"{phase.name}: bytes landed in blocks that were given back"
            )
            beside = reader.is_painted(POISON, list(range(BLOCKS, 2 * BLOCKS)))
            assert beside, f"{phase.name}: bytes landed beside the blocks"

    def expect_idle(self) -> None:
        busy = {"source": self.source.wait_idle()}
        busy |= {phase.name: reader.wait_idle() for phase, reader in self.readers.items()}
        assert not any(busy.values()), {name: counts for name, counts in busy.items() if counts}
        self.is_clean = True

    def close(self) -> None:
        for reader in self.readers.values():
            reader.close()
        self.source.close()
