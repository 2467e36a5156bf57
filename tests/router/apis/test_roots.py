"""What a root is made of, on every route."""

from __future__ import annotations

import pytest

from kvxfer.router.apis import ROUTES
from kvxfer.router.apis.api import ADAPTER, BESIDE, FIELDS, LIMITS, MANY, PROMPTS
from kvxfer.router.apis.roots import ADAPTERS, HEADS, MEMBERS, SALTS, root_fields

WITH_PROMPT = [api for api in ROUTES if api.prompt_fields]


def test_every_field_is_looked_at() -> None:
    names = FIELDS.names
    assert len(set(names)) == len(names)
    for api in WITH_PROMPT:
        assert {*root_fields(api.path), *HEADS} <= set(api.fields.names)


@pytest.mark.parametrize("api", WITH_PROMPT, ids=repr)
def test_adapters_and_salts_are_in_each_root(api: object) -> None:
    path = getattr(api, "path", "")
    assert {*ADAPTERS, *SALTS, ADAPTER, "tools"} <= set(root_fields(path))
    assert len(set(root_fields(path))) == len(root_fields(path))


@pytest.mark.parametrize("api", WITH_PROMPT, ids=repr)
def test_a_prompt_is_in_no_root(api: object) -> None:
    prompt_fields = getattr(api, "prompt_fields", ())
    assert not set(prompt_fields) & set(root_fields(getattr(api, "path", "")))


def test_what_a_next_turn_may_change_is_in_none() -> None:
    assert not set(MEMBERS) & {*PROMPTS, *LIMITS, *MANY, *HEADS, "stream", "user", "tool_choice", "seed", "temperature"}
    assert {*HEADS, "tools"} == set(BESIDE)
