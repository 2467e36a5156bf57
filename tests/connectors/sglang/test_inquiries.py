"""What is asked of other hosts: no thread waits for the answer, and few threads ask."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvxfer.connectors.sglang import inquiries
from kvxfer.connectors.sglang.inquiries import Inquiries
from tests.support.sglang_core.cores import until


class Host:
    """Answers its own address in capitals once it may, and counts."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.asked: list[str] = []
        self.error: Exception | None = None

    def __call__(self, address: str) -> str:
        self.asked.append(address)
        if address.startswith("dead"):
            self.may_answer.wait(20)
        if self.error is not None:
            raise self.error
        return address.upper()


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.may_answer.set()


def taken(inquiries: Inquiries[str], address: str) -> Callable[[], object]:
    return lambda: inquiries.take(address)


def test_an_answer_comes_later_and_once(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    asking = Inquiries(host)
    assert asking.take("a") is None
    until(lambda: asking.look("a") == "A")
    assert asking.take("a") == "A"
    assert asking.take("a") is None
    assert host.asked == ["a"], "again only after a while"
    monkeypatch.setattr(inquiries, "AGAIN_S", 0.0)
    until(lambda: asking.take("a") == "A")
    assert host.asked == ["a", "a"]


def test_silent_host_does_not_delay_other_hosts(host: Host) -> None:
    asking = Inquiries(host)
    began_s = time.monotonic()
    for _ in range(1000):
        assert asking.take("dead") is None
    assert time.monotonic() - began_s < 0.5
    asking.take("live")
    until(taken(asking, "live"), 1.0)
    assert host.asked == ["dead", "live"]
    host.may_answer.set()
    until(taken(asking, "dead"), 1.0)


def test_threads_are_few_and_end(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiries, "THREADS_MAX", 3)
    asking = Inquiries(host)
    names = [f"dead {number}" for number in range(20)]
    for name in names:
        asking.take(name)
    until(lambda: len(host.asked) == 3)
    time.sleep(0.05)
    assert sum(thread.name == "kvxfer inquiry" for thread in threading.enumerate()) <= 3
    assert len(host.asked) == asking._threads == 3
    host.may_answer.set()
    for name in names:
        until(taken(asking, name))
    until(lambda: asking._threads == 0)


def test_unwanted_answer_is_neither_asked_for_nor_kept(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiries, "THREADS_MAX", 1)
    monkeypatch.setattr(inquiries, "STALE_S", 0.2)
    asking = Inquiries(host)
    asking.take("dead")
    until(lambda: host.asked)
    asking.take("given up")
    time.sleep(0.3)
    asking.take("b")
    host.may_answer.set()
    until(lambda: asking.look("b"))
    assert "given up" not in host.asked
    time.sleep(0.3)
    asking.take("c")
    assert set(asking._asked) == {"c"}


def test_a_question_that_raises_is_asked_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiries, "AGAIN_S", 0.0)
    host.error = OSError("no")
    asking = Inquiries(host)
    until(lambda: asking.take("a") or len(host.asked) > 1)
    host.error = None
    until(taken(asking, "a"))
