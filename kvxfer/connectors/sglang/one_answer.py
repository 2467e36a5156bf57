"""Several answers to one prompt, refused by a server of a pair before it begins: each room carries one.

SGLang sends such a prompt n + 1 times under the same ``bootstrap_room`` (0.5.23: managers/tokenizer_manager.py,
``_handle_batch_request``), both servers fail with 500 after that, and a router in front takes them for broken. A
ValueError raised while SGLang reads a request is a 400 in each API of its HTTP server. kvxfer's own router refuses such
a request before it gets here.
"""

from __future__ import annotations

from typing import Any

READ = "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments"


def refuse_several(result: Any, request: Any, *_: Any, **__: Any) -> Any:
    """After SGLang has read a request: raise ValueError where a request with a room asks for several answers."""
    rooms = request.bootstrap_room
    if all(room is None for room in (rooms if isinstance(rooms, list) else [rooms])):
        return None
    for field, count in (("n", _largest(request, "n")), ("beam_width", _largest(request, "beam_width"))):
        if count > 1:
            raise ValueError(
                f"{field}: a prefill and a decode server give one answer to a prompt, and {count} are asked for: send "
                f"the prompt {count} times with {field} 1, or send it to a server that computes whole requests"
            )
    return None


def _largest(request: Any, name: str) -> int:
    """Of a request's sampling parameters, which are one object or a list of them."""
    params = request.sampling_params
    listed = params if isinstance(params, list) else [params]
    counts = [one.get(name) for one in listed if isinstance(one, dict)]
    return max((count for count in counts if type(count) is int), default=1)
