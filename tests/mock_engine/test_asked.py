"""Any JSON object is read or refused by name; tokens and answers are what docs/mock-engine.md says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvxfer.mock_engine import asked
from kvxfer.mock_engine.choice import choices_of
from kvxfer.mock_engine.legs import read_leg
from kvxfer.mock_engine.options import EngineKind, EngineRole, MockEngineOptions
from kvxfer.mock_engine.other_shapes import shape_of
from kvxfer.mock_engine.shape import TokenTotals
from kvxfer.mock_engine.tokens import AnswerWords, PromptTokens, block_keys, ids_of_text, pack_ids, text_of_ids
from kvxfer.mock_engine.tokens import unpack_ids as unpacked
from kvxfer.openai.errors import RequestError

OPTIONS = MockEngineOptions()
READERS = [asked.read_completion, asked.read_chat, asked.read_responses, asked.read_messages, asked.read_generate]
FIELDS = """
prompt messages input text input_ids system instructions max_tokens max_output_tokens max_completion_tokens n stop
stream
stream_options logprobs top_logprobs tools tool_choice response_format echo sampling_params cache_salt
return_logprob kv_transfer_params bootstrap_room bootstrap_host bootstrap_port stop_sequences
"""
SCALARS = st.none() | st.booleans() | st.integers(-2, 40) | st.floats(allow_nan=False) | st.text(max_size=8)
NAMES = """
role content type function name text include_usage do_remote_decode do_remote_prefill transfer_id role remote_host
remote_port remote_block_ids remote_engine_id remote_request_id remote_bootstrap_addr max_new_tokens n
"""
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES.split()), inner, max_size=4),
)
BODIES = st.dictionaries(st.sampled_from(FIELDS.split()), VALUES, max_size=8)


@settings(max_examples=300)
@example({"input": 1, "instructions": True}, asked.read_responses, EngineRole.BOTH, EngineKind.ANY)
@example({"messages": 1, "system": "a"}, asked.read_messages, EngineRole.BOTH, EngineKind.ANY)
@given(body=BODIES, read=st.sampled_from(READERS), role=st.sampled_from(EngineRole), kind=st.sampled_from(EngineKind))
def test_any_object_is_read_or_refused(body: dict[str, Any], read: Any, role: EngineRole, kind: EngineKind) -> None:
    try:
        leg = read_leg(body, role, kind, "id")
        wanted = read(body, OPTIONS)
    except RequestError:
        return
    assert all(leg.keys)
    choices = choices_of(wanted)
    shape = shape_of(wanted, choices, "id")
    totals = TokenTotals(1, 1, 0)
    assert shape.whole(totals, {})
    for choice in choices:
        shape.begin(choice)
        assert all(shape.token(choice, number) for number in range(choice.count))
        assert "".join(choice.piece(number).decode() for number in range(choice.count)) or wanted.stops
    shape.end(totals, {})


@given(text=st.text())
def test_every_text_is_told_from_its_token_ids(text: str) -> None:
    ids = unpacked(ids_of_text(text))
    assert text_of_ids(ids) == text
    assert pack_ids(ids) == ids_of_text(text)
    assert len(ids) == -(-len(text.encode()) // 3)


@given(ids=st.lists(st.integers(0, (1 << 31) - 1), max_size=40))
def test_every_number_of_31_bits_is_a_token_id(ids: list[int]) -> None:
    assert unpacked(pack_ids(ids)) == ids
    text_of_ids(ids)


@pytest.mark.parametrize("ids", [[-1], [1 << 31], ["a"], [1.5], [[1]], [None]])
def test_other_values_are_no_token_ids(ids: Any) -> None:
    with pytest.raises(ValueError, match="token ids"):
        pack_ids(ids)


def test_keys_stand_for_all_tokens_before_them() -> None:
    one, other = pack_ids([1] * 32), pack_ids([2] + [1] * 31)
    assert len(set(block_keys(one, 16)) | set(block_keys(other, 16))) == 4
    assert block_keys(one + pack_ids([9]), 16) == block_keys(one, 16)
    assert block_keys(one, 16, "salt") != block_keys(one, 16)


def test_answers_differ_by_prompt_and_index() -> None:
    texts = {
        AnswerWords(PromptTokens(pack_ids([number])).seed, index).text(8) for number in range(50) for index in (0, 1)
    }
    assert len(texts) == 100
