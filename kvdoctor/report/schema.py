"""The JSON Schemas of `report`, `contract`, `explain` and `env`, derived from their dataclasses by msgspec.

Every field is always written, so all are required; readers must accept fields that are added later.
"""

import inspect
import re
from typing import Any

import msgspec

from kvdoctor.contract import CacheContract
from kvdoctor.report.document import CONTRACT_SCHEMA, SCHEMA, Report
from kvdoctor.report.info_document import ENV_SCHEMA, EXPLAIN_SCHEMA, EnvironmentDocument, Explanation

DIALECT = "https://json-schema.org/draft/2020-12/schema"
INTERNAL = {"node_names"}
"""Fields that the documents leave out."""
ATTRIBUTE = re.compile(r"^    (\w+): (.+(?:\n     +.+)*)", re.MULTILINE)
"""A field and its text in the part `Attributes:` of a docstring."""


def list_schemas() -> dict[str, dict[str, Any]]:
    """The schema of each document, by the name of the command that writes it."""
    kinds = {SCHEMA: Report, EXPLAIN_SCHEMA: Explanation, ENV_SCHEMA: EnvironmentDocument}
    made = {title.split("/")[1]: document_schema(kind, title) for title, kind in kinds.items()}
    return {**made, "contract": contract_schema()}


def contract_schema() -> dict[str, Any]:
    """The schema of `contract --format json`: the cache contract of each stack."""
    contracts = {"type": "object", "additionalProperties": {"$ref": "#/$defs/CacheContract"}}
    return {
        "$schema": DIALECT,
        "title": CONTRACT_SCHEMA,
        "type": "object",
        "properties": {"schema": {"const": CONTRACT_SCHEMA}, "stacks": contracts},
        "required": ["schema", "stacks"],
        "$defs": define_types(CacheContract),
    }


def document_schema(kind: type, title: str) -> dict[str, Any]:
    """A document with its head: the name of its schema, and the tool that wrote it."""
    definitions = define_types(kind)
    body = definitions.pop(kind.__name__)
    tool = {
        "type": "object",
        "properties": {"name": {"const": "kvdoctor"}, "version": {"type": "string"}},
        "required": ["name", "version"],
    }
    body["properties"] = {"schema": {"const": title}, "tool": tool, **body["properties"]}
    body["required"] = ["schema", "tool", *body["required"]]
    return {"$schema": DIALECT, "title": title, **body, "$defs": definitions}


def define_types(kind: type) -> dict[str, dict[str, Any]]:
    """The schema of a dataclass and of every dataclass in it, by name."""
    _, definitions = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    return {name: _require_all(definition) for name, definition in definitions.items()}


def _require_all(definition: dict[str, Any]) -> dict[str, Any]:
    """The schema of a dataclass as it is written: without internal fields, with all others."""
    description, _, attributes = inspect.cleandoc(definition["description"]).partition("\n\nAttributes:\n")
    texts = {name: " ".join(text.split()) for name, text in ATTRIBUTE.findall(attributes)}
    properties = {
        name: {key: value for key, value in schema.items() if key != "default"}
        | ({"description": texts[name]} if name in texts else {})
        for name, schema in definition["properties"].items()
        if name not in INTERNAL
    }
    return {"type": "object", "description": description, "properties": properties, "required": list(properties)}
