"""What of JSON Schema ``run.schema.json`` uses, and no more; an unknown word is an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

WORDS = {"$schema", "$defs", "$ref", "title", "description", "type", "const", "enum", "anyOf", "required"}
WORDS |= {"properties", "additionalProperties", "items", "minItems", "maxItems", "minimum", "maximum"}
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def violations(value: Any, schema: Any, whole: Mapping[str, Any], where: str = "$") -> Iterator[str]:
    """What of ``value`` the schema does not allow, in sentences."""
    if isinstance(schema, bool):
        if not schema:
            yield f"{where} may not be there"
        return
    assert set(schema) <= WORDS, set(schema) - WORDS
    if "$ref" in schema:
        assert schema["$ref"].startswith("#/$defs/")
        yield from violations(value, whole["$defs"][schema["$ref"].removeprefix("#/$defs/")], whole, where)
    if "type" in schema and not _is_of(value, schema["type"]):
        yield f"{where} is no {schema['type']}: {value!r:.80}"
        return
    if "const" in schema and value != schema["const"]:
        yield f"{where} is not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} is none of {schema['enum']}: {value!r:.80}"
    if "anyOf" in schema and all(list(violations(value, one, whole, where)) for one in schema["anyOf"]):
        yield f"{where} is none of what it may be: {value!r:.80}"
    if isinstance(value, dict):
        yield from _members(value, schema, whole, where)
    elif isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield f"{where} has {len(value)} items"
        for at, one in enumerate(value):
            yield from violations(one, schema.get("items", True), whole, f"{where}[{at}]")
    elif isinstance(value, (int, float)) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        yield f"{where} is out of range: {value}"


def _members(
    value: Mapping[str, Any], schema: Mapping[str, Any], whole: Mapping[str, Any], where: str
) -> Iterator[str]:
    known = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{where}.{name} is missing"
    for name, one in value.items():
        yield from violations(one, known.get(name, schema.get("additionalProperties", True)), whole, f"{where}.{name}")


def _is_of(value: Any, kind: str) -> bool:
    return isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
