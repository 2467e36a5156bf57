"""Chunks that pass as they came give the client the same bytes as when each is taken apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.openai.sse import Event
from kvxfer.router.apis import StreamStyle
from kvxfer.router.apis.messages_style import MESSAGES
from kvxfer.router.apis.openai_style import OPENAI
from kvxfer.router.apis.responses_style import RESPONSES
from kvxfer.router.stream_relay import StreamRelay
from kvxfer.router.upstream.limits import UpstreamLimits
from kvxfer.router.upstream.parser import COMPLETE, AnswerParser, discard

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = (
    b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":3}}\n\n',
    b": a comment\n\n",
    b"data: [DONE]\n\n",
    b'data: {"choices":[{"index":0,"text":" [DONE]","finish_reason":null}]}\n\n',
    b'data: {"choices":[{"index":0,"text":"b"}]}\r\n\r\n',
)
EDITED = b"data: edited\n\n"


class Client:
    """What the relay writes: pieces of body, and whole chunks."""

    def __init__(self) -> None:
        self.got = b""
        self.whole_chunks = 0

    def write_chunks(self, data: bytes) -> None:
        self.whole_chunks += 1
        parser = AnswerParser(UpstreamLimits())
        parser.begin(self.write, to_head=False)
        parser.feed(HEAD + data + b"0\r\n\r\n")
        assert parser.stage == COMPLETE

    def write(self, piece: bytes) -> None:
        self.got += piece


def relayed(reads: list[bytes], *, takes: bool) -> tuple[bytes, int, int, int]:
    client = Client()

    def edit(event: Event) -> bytes:
        return EDITED

    relay = StreamRelay(
        OPENAI,
        begin=lambda: None,
        write=client.write,
        write_chunks=lambda: client.write_chunks if takes else None,
        edit=edit,
        edit_marks=(b'"prompt_tokens"',),
    )
    parser = AnswerParser(UpstreamLimits())
    parser.begin(discard, to_head=False)
    parser.feed(HEAD)
    parser.emit = relay.feed
    for read in reads:  # as the connection does
        if parser.is_between_chunks and (size := relay.take(read)):
            parser.passed(size)
        else:
            parser.feed(read)
    assert parser.stage == COMPLETE
    return client.got, relay.bytes_passed, parser.body_bytes, client.whole_chunks


@given(
    events=st.lists(st.sampled_from(EVENTS), min_size=1, max_size=12),
    joins=st.lists(st.integers(1, 4), min_size=1, max_size=12),
    cuts=st.lists(st.integers(1, 150), max_size=8),
    is_cut=st.booleans(),
)
def test_the_client_gets_the_same_bytes(events: list[bytes], joins: list[int], cuts: list[int], is_cut: bool) -> None:
    """Events are joined into chunks, and the reads are whole chunks, or cut anywhere."""
    chunks = []
    left = [EVENTS[0], *events]
    for count in joins * 4:
        body, left = b"".join(left[:count]), left[count:]
        if body:
            chunks.append(b"%x\r\n%b\r\n" % (len(body), body))
    reads = [*chunks, b"0\r\n\r\n"]
    if is_cut:
        whole, reads = b"".join(reads), []
        for cut in cuts:
            reads, whole = [*reads, whole[:cut]], whole[cut:]
        reads = [read for read in (*reads, whole) if read]
    taken, plain = relayed(reads, takes=True), relayed(reads, takes=False)
    assert taken[:3] == plain[:3]


def test_chunks_of_a_running_stream_are_not_taken_apart() -> None:
    chunk = b"%x\r\n%b\r\n" % (len(EVENTS[0]), EVENTS[0])
    *_, whole = relayed([chunk] * 10 + [b"0\r\n\r\n"], takes=True)
    assert whole == 9


TOKEN = b'data: {"type":"content_block_delta","choices":[{"index":0,"text":"a"}],"delta":{"text":"a"}}\n\n'
CLOSE = TOKEN.replace(b"data: ", b"data:")
SPACED = b'data:  {"type":"content_block_delta","choices":[{"index":0,"text":"a"}],"delta":{"text":"a"}}\r\n\r\n'
SIGNS = (
    b": c\n\n",
    b":\n\n",
    b": c\r\n\r\n",
    b": data: {\n\n",
    b"event: ping\n\n",
    b"data:\n\n",
    b"id: 1\n\n",
)
PING = b'event: ping\ndata: {"type": "ping"}\n\n'


@pytest.mark.parametrize("style", [OPENAI, RESPONSES, MESSAGES])
@given(
    bodies=st.lists(
        st.lists(st.sampled_from((*SIGNS, PING, TOKEN, CLOSE, SPACED)), min_size=1, max_size=4), max_size=8
    ),
    takes=st.booleans(),
    cut=st.integers(0, 200),
)
def test_a_chunk_of_keepalives_is_not_heard(
    style: StreamStyle, bodies: list[list[bytes]], takes: bool, cut: int
) -> None:
    client = Client()
    relay = StreamRelay(
        style,
        begin=lambda: None,
        write=client.write,
        write_chunks=lambda: client.write_chunks if takes else None,
        edit=lambda event: event.raw,
        edit_marks=(),
    )
    relay.feed(TOKEN)
    pings = PING if style is MESSAGES else b""
    for body in bodies:
        before, sent = relay.bytes_heard, b"".join(body)
        whole = b"%x\r\n%b\r\n" % (len(sent), sent)
        if not relay.take(whole):
            relay.feed(sent[:cut])
            relay.feed(sent[cut:])
        has_some = any(event not in (*SIGNS, pings) for event in body)
        assert (relay.bytes_heard > before) is has_some
    assert client.got == TOKEN + b"".join(b"".join(body) for body in bodies)


def test_a_long_event_is_heard_before_it_is_whole() -> None:
    relay = StreamRelay(OPENAI, begin=lambda: None, write=lambda piece: None, edit=lambda event: None, edit_marks=())
    relay.feed(TOKEN)
    relay.feed(b'data: {"choices":[{"text":"')
    before = relay.bytes_heard
    for _ in range(4):
        relay.feed(b"x" * 2000)
    assert relay.bytes_heard > before
