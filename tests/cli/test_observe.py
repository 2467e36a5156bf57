"""Log lines: their looks, and what they must not show."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from kvxfer import observe
from kvxfer.errors import ConfigError


@pytest.fixture(autouse=True)
def hidden_values() -> Iterator[None]:
    yield
    observe._hidden_values.clear()


def logged(style: str, level: str = "info", **fields: object) -> str:
    stream = io.StringIO()
    observe.configure_logging(level=level, style=style, stream=stream)
    logging.getLogger("kvxfer.router").warning("worker lost", extra=fields)
    return stream.getvalue()


def test_text() -> None:
    line = logged("text", agent_id="decode-0", why="it is gone")
    assert line.endswith('WARNING router: worker lost agent_id=decode-0 why="it is gone"\n')


def test_json() -> None:
    entry = json.loads(logged("json", agent_id="decode-0"))
    assert entry["message"] == "worker lost"
    assert entry["level"] == "warning"
    assert entry["agent_id"] == "decode-0"


@pytest.mark.parametrize("style", observe.STYLES)
def test_secrets_are_hidden(style: str) -> None:
    observe.hide(b"0123456789abcdef0123")
    line = logged(
        style,
        cluster_token="abc",
        session_key="def",
        note="key 30313233343536373839616263646566" + "30313233 or 0123456789abcdef0123",
        header="Bearer sk-verysecret",
        prompt_tokens=12,
    )
    for secret in ("abc", "def", "sk-verysecret"):
        assert secret not in line.replace("[hidden]", "")
    assert "12" in line


def test_level() -> None:
    assert logged("text", level="error") == ""


@pytest.mark.parametrize("is_handled", [False, True])
def test_a_program_inside_another_logs_with_fields_unless_its_host_handles_its_records(
    is_handled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = logging.getLogger("kvxfer"), logging.NullHandler()
    monkeypatch.setattr(ours, "propagate", False)
    monkeypatch.setattr(ours, "handlers", [theirs] if is_handled else [])
    observe.log_in_host_program()
    observe.log_in_host_program()
    assert len(ours.handlers) == 1
    assert (ours.handlers == [theirs]) is is_handled
    assert isinstance(ours.handlers[0].formatter, observe.TextFormatter) is not is_handled


def test_wrong_settings() -> None:
    with pytest.raises(ConfigError, match="log level"):
        observe.configure_logging(level="loud")
    with pytest.raises(ConfigError, match="log style"):
        observe.configure_logging(style="xml")


def test_spans() -> None:
    seen: list[observe.Span] = []
    with observe.span("no listener"):
        pass
    with observe.spans_to(seen.append):
        with observe.span("wire", lane="mapped") as attributes:
            attributes["bytes"] = 5
        with pytest.raises(KeyError), observe.span("plan"):
            raise KeyError("x")
    assert [(span.name, dict(span.attributes), span.error) for span in seen] == [
        ("wire", {"lane": "mapped", "bytes": 5}, None),
        ("plan", {}, "KeyError"),
    ]
    assert all(span.duration_ns >= 0 for span in seen)


def test_a_span_may_end_elsewhere_and_ends_once() -> None:
    seen: list[observe.Span] = []
    trace = observe.next_traceparent(None)
    opened = observe.OpenSpan("hold", trace, blocks=3)
    with observe.spans_to(seen.append):
        opened.end("grant_expired", bytes=5)
        opened.end()
    (span,) = seen
    assert (span.name, span.parent, span.error) == ("hold", trace, "grant_expired")
    assert span.attributes == {"blocks": 3, "bytes": 5}


IDS = "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"


def test_traceparent() -> None:
    received = f"00-{IDS}-01"
    following = observe.next_traceparent(received)
    assert following.split("-")[1] == received.split("-")[1]
    assert following != received
    assert observe.next_traceparent("nonsense").startswith("00-")
    assert observe.is_traceparent(following)
    assert observe.traceparent_of(received) == received


@pytest.mark.parametrize(
    "wrong",
    [
        *(None, 7, "", "nonsense", f"00-{IDS}-01".upper(), f"00-{IDS}-1", f"00-{IDS}", f"00-{IDS}-01\n"),
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
        f"ff-{IDS}-01",
        f"ff-{IDS}-01-more",
        *(f"00-{IDS}-01-", f"00-{IDS}-01-more", f"01-{IDS}-01more", f"01-{IDS}-01-{'m' * 600}"),
    ],
)
def test_what_is_no_traceparent(wrong: object) -> None:
    assert not observe.is_traceparent(wrong)
    assert observe.traceparent_of(wrong) is None
    if wrong is None or isinstance(wrong, str):
        assert "0af7651916cd43dd" not in observe.next_traceparent(wrong)


@pytest.mark.parametrize("later", [f"01-{IDS}-03", f"fe-{IDS}-03-", f"cc-{IDS}-03-what-comes.later"])
def test_a_traceparent_of_a_later_version_is_passed_on_as_version_00(later: str) -> None:
    assert observe.traceparent_of(later) == f"00-{IDS}-01"
    assert observe.next_traceparent(later)[:36] == f"00-{IDS}"[:36]
