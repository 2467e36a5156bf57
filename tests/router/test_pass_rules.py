"""Which paths may pass through, read from ``--pass-through``: pure."""

from __future__ import annotations

import pytest

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
from kvxfer.router.pass_rules import OWN_PATHS, RULES_MAX, PassRule, read_rules
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
