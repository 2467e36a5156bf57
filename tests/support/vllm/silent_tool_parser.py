"""A tool-call parser for vLLM (``--tool-parser-plugin``) that holds everything back until the answer is over, as a
parser of a long argument does. Loaded by vLLM's API server."""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

NAME = "holds_back"


@ToolParserManager.register_module(NAME)
class HoldsBack(ToolParser):  # type: ignore[misc]
    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)

    def extract_tool_calls_streaming(self, *_: Any, **__: Any) -> None:
        return None
