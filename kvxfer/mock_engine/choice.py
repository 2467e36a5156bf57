"""One sequence of an answer: its words, known before the first of them is due.

Decides how many tokens the answer has, why it ends, and the text of each token. It must never know how text is put into
an answer's JSON.
"""

from __future__ import annotations

import json

from kvxfer.mock_engine.asked import AskedAnswer
from kvxfer.mock_engine.tokens import ID_BYTES, WORD_BYTES, WORD_IDS, AnswerWords, PromptTokens


def _escaped(text: str) -> bytes:
    return json.dumps(text)[1:-1].encode()


class ChoiceText:
    """The answer ``index`` to ``prompt``. ``piece`` is the text of one token, escaped for a JSON string."""

    __slots__ = ("_pieces", "count", "finish_reason", "index", "number", "prompt", "words")

    def __init__(self, asked: AskedAnswer, prompt: PromptTokens, number: int, index: int) -> None:
        self.prompt = prompt
        self.number = number
        """Which of the prompts it answers."""
        self.index = index
        self.words = AnswerWords(prompt.seed, index - number * asked.n)
        self.count = asked.max_tokens
        self.finish_reason = "stop" if asked.is_default_length else "length"
        self._pieces: list[str] | None = None
        if asked.stops or asked.is_json or asked.tool:
            self._pieces = self._made_pieces(asked)
            self.count = len(self._pieces)

    def piece(self, number: int) -> bytes:
        if self._pieces is None:
            return WORD_BYTES[self.words.position(number)]
        return _escaped(self._pieces[number])

    @property
    def is_plain(self) -> bool:
        """Every piece is one word, and all words are equally long."""
        return self._pieces is None

    def text(self, count: int | None = None) -> str:
        """The text of the first ``count`` tokens."""
        if self._pieces is None:
            return self.words.text(self.count if count is None else count)
        return "".join(self._pieces[:count])

    def token_id(self, number: int) -> int:
        return WORD_IDS[self.words.position(number)]

    def packed_ids(self) -> bytes:
        return b"".join([WORD_IDS[self.words.position(i)].to_bytes(ID_BYTES, "little") for i in range(self.count)])

    def _made_pieces(self, asked: AskedAnswer) -> list[str]:
        pieces = [WORD_BYTES[self.words.position(number)].decode() for number in range(self.count)]
        whole, end = "".join(pieces), None
        for stop in asked.stops:
            at = whole.find(stop)
            if at >= 0 and (end is None or at + len(stop) < end[1]):
                end = (at, at + len(stop))
        if end is not None:
            self.finish_reason = "stop"
            width = len(pieces[0])
            pieces = pieces[: -(-end[1] // width)]
            # What belongs to the stop string is not sent; a token without text is still a token.
            pieces = [piece[: max(0, end[0] - at * width)] for at, piece in enumerate(pieces)]
        if asked.tool or asked.is_json:
            self.finish_reason = "tool_calls" if asked.tool else "stop"
            pieces[0] = '{"text": "' + pieces[0]
            pieces[-1] += '"}'
        return pieces


def choices_of(asked: AskedAnswer) -> list[ChoiceText]:
    """All sequences of one request, in the order of their index."""
    return [
        ChoiceText(asked, prompt, number, number * asked.n + copy)
        for number, prompt in enumerate(asked.prompts)
        for copy in range(asked.n)
    ]
