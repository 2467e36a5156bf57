"""Which paths may pass through, read from ``--pass-through``: pure."""

from __future__ import annotations

import posixpath
import unicodedata
import urllib.parse
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import ConfigError
from kvxfer.policy.admit import AdmitOptions
from kvxfer.router.admin import AdminAccess
from kvxfer.router.apis import ROUTES
from kvxfer.router.app import build_app
from kvxfer.router.auth import ApiKeys
from kvxfer.router.core import RouterCore
from kvxfer.router.fleet.workers import Workers
from kvxfer.router.front import Door, Front
from kvxfer.router.metrics import RouterMetrics
from kvxfer.router.options import RouterOptions
from kvxfer.router.pass_rules import OWN_PATHS, RULES_MAX, PassRule, is_read_alike, read_rules
from kvxfer.serving.bodies import Bodies


def test_the_longest_prefix_comes_first() -> None:
    rules = read_rules(["/v1/audio/=decode", "/v1/audio/speech=tts-1", "/v1/images/=engine"])
    assert [rule.prefix for rule in rules] == ["/v1/audio/speech", "/v1/images/", "/v1/audio/"]
    assert rules[0] == PassRule("/v1/audio/speech", "tts-1")


@pytest.mark.parametrize(
    ("prefix", "path", "matches"),
    [
        ("/v1/audio/", "/v1/audio/speech", True),
        ("/v1/audio/", "/v1/audio/", True),
        ("/v1/audio/", "/v1/audio", False),
        ("/v1/audio/", "/v1/audiobooks", False),
        ("/v1/audio", "/v1/audio", True),
        ("/v1/audio", "/v1/audio/speech", False),
    ],
)
def test_a_slash_at_the_end_stands_for_all_below(prefix: str, path: str, matches: bool) -> None:
    assert PassRule(prefix, "decode").matches(path) is matches


def test_a_models_name_may_have_any_sign() -> None:
    assert read_rules(["/x/=org/model=v1"])[0].pool == "org/model=v1"


@pytest.mark.parametrize(
    "text",
    [
        *("/=decode", "/v1/=decode", "/v1/chat/=decode", "/health=decode", "/workers/=prefill", "/workers/x/=prefill"),
        *("/v1/models/x=engine", "/docs/=engine", "/metrics=engine", "/generate=engine", "/ui/=engine"),
    ],
)
def test_a_rule_that_would_hide_a_route_of_the_router_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"pass_through .*would hide the router's own route /"):
        RouterOptions(pass_through=(text,))


@pytest.mark.parametrize(
    "text",
    [
        *("", "decode", "/v1/audio/", "/v1/audio/=", "v1/audio/=decode", "/v1/../x=decode", "/./x/=decode"),
        *(
            "/v1//audio=decode",
            "//=decode",
            "/v1/%61/=decode",
            "/a b=decode",
            "/a?x=decode",
            "/ä/=decode",
            "/a,b=decode",
            "=decode",
        ),
    ],
)
def test_a_rule_that_cannot_be_read_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^pass_through "):
        read_rules([text])


def test_a_path_is_given_once_and_rules_are_bounded() -> None:
    with pytest.raises(ConfigError, match="twice"):
        read_rules(["/a/=decode", "/a/=prefill"])
    with pytest.raises(ConfigError, match="at most"):
        read_rules([f"/a{number}/=decode" for number in range(RULES_MAX + 1)])


async def test_the_list_of_own_paths_is_that_of_the_application() -> None:
    workers = Workers()
    core, door = RouterCore(RouterOptions(), workers, RouterMetrics(workers)), Door(AdmitOptions())
    front = Front(core, ApiKeys(), door)
    app = build_app(core, ApiKeys(), door, front, AdminAccess(ApiKeys(), True), Bodies(RouterOptions()))
    served = {str(getattr(route, "path", "")) for route in app.routes} | {api.path for api in ROUTES}

    def is_own(path: str) -> bool:
        return any(path == own or (own.endswith("/") and path.startswith(own)) for own in OWN_PATHS)

    assert [path for path in sorted(served) if not is_own(path)] == []
    assert {api.path for api in ROUTES} <= set(OWN_PATHS)


# What is passed on stays below its rule.

PREFIX = "/v1/audio/"
REFUSED = (
    *(
        "../x",
        "./x",
        "..",
        ".",
        "x/../y",
        "x/..",
        "..;/x",
        "..;a=b/x",
        ".;/x",
        "x/..;",
        "%2e%2e/x",
        "%2E./x",
        "x/%2e%2e",
    ),
    *(
        "%252e%252e/x",
        "%25252e%25252e/x",
        "%c0%ae%c0%ae/x",
        "%e0%80%ae./x",
        "%f0%80%80%ae/x",
        "%c0%af../x",
        "%ff",
        "%80",
    ),
    *(
        "%00",
        "x%00/../..",
        "%0a",
        "%0d%0ax",
        "%7f",
        "%c2%85",
        "..%5cx",
        "x%5c..%5cy",
        "..%2fx",
        "x%2F..%2Fy",
        "%252f",
        "//x",
    ),
    *(
        "/x",
        "x//y",
        ";/x",
        "x/;a/y",
        "..%3b/x",
        "..%253b/x",
        "..%23",
        "..%3fx",
        "%23",
        "%3f",
        "100%25",
        "%",
        "%zz",
        "%u002e",
    ),
    *(
        "..%20/x",
        "%20../x",
        "%20/x",
        "%ef%bc%8e%ef%bc%8e/x",
        "%e2%80%a5/x",
        "x%ef%bc%8f..%ef%bc%8f",
        "%ef%bc%85",
        "%ef%bc%bc",
    ),
)
TAKEN = (
    *(
        "",
        "x",
        "speech",
        "x/y/",
        "a%20b",
        "a;b=c/d",
        "x;",
        "...",
        "..x",
        "x..",
        ".x",
        "%41",
        "~a!$&'()*+,=:@-_",
        "%C3%A9",
        "%3bx",
    ),
    *("a%2cb", "%e6%97%a5", "x%2e", "%2e%2e%2e", "a.b.c"),
)


def passes(raw: str) -> bool:
    path = urllib.parse.unquote(raw)
    return path.startswith(PREFIX) and is_read_alike(raw.encode(), path)


@pytest.mark.parametrize("rest", REFUSED)
def test_a_path_that_may_be_read_otherwise_does_not_pass(rest: str) -> None:
    assert not passes(PREFIX + rest)


@pytest.mark.parametrize("rest", TAKEN)
def test_a_plain_path_passes(rest: str) -> None:
    assert passes(PREFIX + rest)


def laxly(data: bytes) -> str:
    """As a decoder of UTF-8 that takes overlong forms."""
    for tail in (b"\xc0", b"\xe0\x80", b"\xf0\x80\x80"):
        for letter in b"./\\;%":
            data = data.replace(tail + bytes([letter | 0x80]), bytes([letter]))
    return unicodedata.normalize("NFKC", data.decode("utf-8", "replace"))


def readings(raw: str) -> Iterator[str]:
    """The path as servers of many kinds would have it, without its dots."""
    data = raw.encode()
    for _ in range(4):
        whole = laxly(data)
        for text in {whole, whole.replace("\\", "/")}:
            for cut in {text, *(text.partition(mark)[0] for mark in "\0#?")}:
                for segments in (cut.split("/"), [one.partition(";")[0].strip() for one in cut.split("/")]):
                    for kept in (segments, ["", *(one for one in segments if one)]):
                        yield posixpath.normpath("/".join(kept)).replace("//", "/") + "/"
        data = urllib.parse.unquote_to_bytes(data)


PIECES = st.sampled_from(
    [
        *(
            "..",
            ".",
            "/",
            ";",
            "%2e",
            "%2E",
            "%2f",
            "%5c",
            "\\",
            "%252e",
            "%252f",
            "%25",
            "%c0%ae",
            "%c0%af",
            "%00",
            "x",
        ),
        *(
            "%3b",
            "%23",
            "%3f",
            "%20",
            "audio",
            "v1",
            "%e0%80%ae",
            "%25c0%25ae",
            "%ef%bc%8e",
            "%ef%bc%8f",
            "%e2%80%a5",
            "//",
            "a=b",
        ),
        *("%0a", "%25252e", "%u002e", "%", "~"),
    ]
)


@settings(max_examples=400)
@given(st.lists(PIECES, max_size=7).map("".join))
def test_what_passes_stays_below_its_rule_however_it_is_read(rest: str) -> None:
    raw = PREFIX + rest
    if passes(raw):
        assert all(reading.startswith(PREFIX) for reading in readings(raw)), raw


def test_the_readings_find_what_leaves() -> None:
    """The judge of the test above is not blind."""
    for rest in ("..%2fmodels", "..;/models", "%252e%252e/models", "%c0%ae%c0%ae/models", "..%5cmodels", "..%00"):
        assert not all(reading.startswith(PREFIX) for reading in readings(PREFIX + rest)), rest
