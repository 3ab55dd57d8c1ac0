"""Writes kvdoctor/model/operator_versions.json from the installed onnx: `python docs/make_operators.py`.

An inspection must not load the operators of onnx, which takes longer than all of its own work; this table has what the
rules of `kvdoctor.model.validity` need of them.
"""

import json
from pathlib import Path
from typing import Any

import onnx
from onnx.defs import OpSchema, get_all_schemas_with_history, onnx_opset_version

TABLE = Path(__file__).parents[1] / "kvdoctor/model/operator_versions.json"
UNLIMITED = 2**31 - 1  # how onnx writes that any number of values is allowed


def table() -> dict[str, Any]:
    """Every version of every standard operator, as the fields of `kvdoctor.model.validity.Signature`."""
    found: dict[str, list[list[Any]]] = {}
    for schema in get_all_schemas_with_history():
        if not schema.domain:
            found.setdefault(schema.name, []).append(_entry(schema))
    operators = {name: sorted(found[name]) for name in sorted(found)}
    return {"onnx": onnx.__version__, "opset": onnx_opset_version(), "operators": operators}


def _entry(schema: OpSchema) -> list[Any]:
    needed = [at for at, one in enumerate(schema.inputs) if one.option == OpSchema.FormalParameterOption.Single]
    attributes = {name: _type_of(one) for name, one in sorted(schema.attributes.items())}
    required = sorted(name for name, one in schema.attributes.items() if one.required)
    inputs, outputs = [schema.min_input, schema.max_input], [schema.min_output, schema.max_output]
    most = [None if high == UNLIMITED else high for _, high in (inputs, outputs)]
    return [
        schema.since_version,
        [inputs[0], most[0]],
        [outputs[0], most[1]],
        needed,
        attributes,
        required,
        schema.deprecated,
    ]


def _type_of(attribute: Any) -> int:
    """The number of `AttributeProto.AttributeType`; onnx declares no fields of it to type checkers."""
    return int(attribute.type.value)


def text() -> str:
    """The table, one operator a line."""
    made = table()
    lines = [f"    {json.dumps(name)}: {json.dumps(entries)}" for name, entries in made["operators"].items()]
    head = f'{{\n  "onnx": {json.dumps(made["onnx"])},\n  "opset": {made["opset"]},\n  "operators": {{\n'
    return head + ",\n".join(lines) + "\n  }\n}\n"


if __name__ == "__main__":
    TABLE.write_text(text(), encoding="utf-8")
