"""Mutated models: `python -m evidence.mutations.mutate COMMAND COUNT [FIRST]` runs a command on as many.

Each number is one mutation of one fixture: bits of the file, text that is not UTF-8, fields of its messages, shapes,
names, attributes, operators, circles, functions, opsets, external data, or side-cars. Each run must end in time,
without a traceback and without a crash of a check or repair, change nothing and leave nothing. A refused call must
name the model: a wrong option would test nothing. What does not is printed, and the exit code is 1.
"""

import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import AttributeProto, TensorProto

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.bad_models import EXPORTS, call, copied, unchanged
from support.damage import damage_bytes, damage_side_car
from support.text_fixtures import load_all

NUMBERS = (0, 1, -1, 2, 3, 7, 64, 1 << 31, (1 << 31) - 1, -(1 << 31), 1 << 62, -(1 << 63), (1 << 63) - 1)
TEXTS = (
    "",
    "x",
    "../x",
    "/etc/passwd",
    "\x1b[31m\r\n",
    "a" * 5000,
    "\u202e",
    "past_key_values.0.key",
    "If",
    "Loop",
    "?",
)
TYPES = {number: name for name, number in vars(FieldDescriptor).items() if name.startswith("TYPE_")}
WRONG = re.compile(r".{,200}crashed \(.{,400}please report it|Traceback")
SECONDS = 100.0
LIMITS = ("--timeout", "20", "--max-memory", "1500")
JSON = ("--format", "json")
COMMANDS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect", *JSON),
    "step-test": ("step-test", *LIMITS, *JSON),
    "re-export": ("re-export", "-o", "OUT", *LIMITS, *JSON),
    "contract": ("contract", *JSON),
    "diff": ("diff", str(EXPORTS / "gpt2"), *LIMITS, *JSON),
    "loop": ("loop", "--language", "python", "-o", "OUT"),
    "repro": ("repro", "-o", "OUT", *LIMITS, *JSON),
}
CONVERSIONS = (
    *(("--layout", name) for name in ("genai", "merged", "pair", "optimum", "optimum-pair", "shared", "single")),
    *(("--cache", form) for form in ("static", "static=40", "growing")),
    *(("--cache-type", kind) for kind in ("float16", "int8")),
    *(("--attention", "gqa"), ("--logits", "last"), ("--logits", "selectable"), ("--axes", "readable")),
    *(("--opset", "21"), ("--ir-version", "10"), ("--sizes", "batch=1,new=1,past=16")),
)


def mutate(number: int, folder: Path) -> str:
    """Write mutation `number` into a new folder; gives the fixture and what was changed."""
    random = Random(number)  # noqa: S311 - reproducible
    exports = sorted(path for path in EXPORTS.iterdir() if path.is_dir())
    if random.random() < 0.3:
        name = random.choice(exports).name
        copied(EXPORTS / name, folder)
    else:
        name = random.choice(sorted(load_all()))
        load_all()[name].write(folder)
    how = random.choice(list(WAYS))
    models = sorted(folder.rglob("*.onnx"))
    if how == "side-cars":
        damage_side_car(folder, random)
    elif how in ("bits", "cut", "not UTF-8") or not models:
        file = random.choice(models or sorted(path for path in folder.rglob("*") if path.is_file()))
        content = bytearray(file.read_bytes())
        damage_bytes(content, random, how)
        file.write_bytes(content)
    else:
        file = random.choice(models)
        model = onnx.load(file, load_external_data=False)
        for _ in range(random.choice((1, 1, 1, 2, 4))):
            WAYS[how](model, random)
        file.write_bytes(model.SerializeToString())
    return f"{number}: {name}, {how}"


def _messages(message: Message) -> list[Message]:
    """A message and all inside it, without those of weights beyond the first."""
    found, waiting = list[Message](), [message]
    while waiting and len(found) < 3000:
        one = waiting.pop()
        found.append(one)
        for field, value in one.ListFields():
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                waiting += list(value) if hasattr(value, "add") else [value]
    return found


def _change_field(model: onnx.ModelProto, random: Random) -> None:
    """Any field of any message: another value, none, or twice."""
    message = random.choice(_messages(model))
    fields = list(message.DESCRIPTOR.fields)
    field = random.choice(([one for one, _ in message.ListFields()] if random.random() < 0.7 else None) or fields)
    value = getattr(message, field.name)
    if hasattr(value, "append") or hasattr(value, "add"):
        _change_list(value, field, random)
    elif field.type == FieldDescriptor.TYPE_MESSAGE or random.random() < 0.3:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _value(field, random))


def _change_list(values: Any, field: FieldDescriptor, random: Random) -> None:
    if not len(values):
        values.extend([] if field.type == FieldDescriptor.TYPE_MESSAGE else [_value(field, random)])
        return
    place, way = random.randrange(len(values)), random.choice(("remove", "twice", "swap", "change"))
    if way == "remove":
        del values[place]
    elif way == "twice":
        values.extend([values[place]])
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        other = random.randrange(len(values))
        kept = deepcopy(values[place])
        values[place].CopyFrom(values[other])
        values[other].CopyFrom(kept)
    else:
        values[place] = _value(field, random) if way == "change" else values[random.randrange(len(values))]


def _value(field: FieldDescriptor, random: Random) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return "a" * (1 << 20) if random.random() < 0.03 else random.choice(TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return random.choice((b"", b"\0", b"\xff" * 8, b"\0" * 1000))
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return random.choice((0.0, -1.0, float("nan"), float("inf"), 1e30))
    if field.type == FieldDescriptor.TYPE_ENUM:
        return random.choice(list(field.enum_type.values_by_number))
    signed, wide = "UINT" not in TYPES[field.type], "64" in TYPES[field.type]
    least, most = (-(1 << 63) if signed else 0, (1 << 63) - 1) if wide else (-(1 << 31) if signed else 0, (1 << 31) - 1)
    return random.choice([number for number in NUMBERS if least <= number <= most])


def _change_shape(model: onnx.ModelProto, random: Random) -> None:
    """A size of an input, output, value or weight: another number, a name, none, an axis more or less."""
    graph = model.graph
    values = [one for one in (*graph.input, *graph.output, *graph.value_info) if one.type.HasField("tensor_type")]
    if graph.initializer and (random.random() < 0.3 or not values):
        weight = random.choice(graph.initializer)
        if weight.dims:
            weight.dims[random.randrange(len(weight.dims))] = random.choice(NUMBERS)
        return
    if not values:
        return
    tensor = random.choice(values).type.tensor_type
    if random.random() < 0.15:
        tensor.elem_type = random.choice(list(TensorProto.DataType.values()))
    elif not tensor.shape.dim or random.random() < 0.2:
        tensor.shape.dim.add(dim_value=random.choice(NUMBERS))
    elif random.random() < 0.2:
        del tensor.shape.dim[random.randrange(len(tensor.shape.dim))]
    else:
        size = tensor.shape.dim[random.randrange(len(tensor.shape.dim))]
        names = [one.dim_param for value in values for one in value.type.tensor_type.shape.dim if one.dim_param]
        if random.random() < 0.5:
            size.dim_value = random.choice(NUMBERS)
        else:
            size.dim_param = random.choice((*names, *TEXTS))


def _change_name(model: onnx.ModelProto, random: Random) -> None:
    """The name of an input, output, node or value: a hostile one, or that of another."""
    graph = model.graph
    owners: list[Any] = [*graph.input, *graph.output, *graph.initializer, *graph.node]
    names = [one.name for one in owners]
    if random.random() < 0.5 and graph.node:
        node = random.choice(graph.node)
        ports = random.choice([node.input, node.output])
        if len(ports):
            made = (name for one in graph.node for name in one.output)
            ports[random.randrange(len(ports))] = random.choice((*names, *TEXTS, *made))
    elif owners:
        random.choice(owners).name = random.choice((*names, *TEXTS))


def _change_node(model: onnx.ModelProto, random: Random) -> None:
    """An operator, domain or attribute of a node, its place, or the node itself."""
    graph = model.graph
    nested = [a.g for n in graph.node for a in n.attribute if a.type == AttributeProto.GRAPH]
    nodes = random.choice([graph, *nested]).node
    if not nodes:
        return
    node, way = random.choice(nodes), random.random()
    if way < 0.3 and node.attribute:
        attribute = random.choice(node.attribute)
        field = random.choice([one for one, _ in attribute.ListFields()])
        values = getattr(attribute, field.name)
        if hasattr(values, "append") or hasattr(values, "add"):
            _change_list(values, field, random)
        elif field.type != FieldDescriptor.TYPE_MESSAGE:
            setattr(attribute, field.name, _value(field, random))
    elif way < 0.6:
        node.op_type = random.choice((*(one.op_type for one in nodes), *TEXTS, "Identity", "Scan", "Cast"))
    elif way < 0.8:
        nodes.remove(node)
    else:
        moved = deepcopy(node)
        nodes.remove(node)
        nodes.insert(random.randrange(len(nodes) + 1), moved)


def _change_external(model: onnx.ModelProto, random: Random) -> None:
    """A weight outside of the file, at a place that may not be there."""
    if not model.graph.initializer:
        return
    weight = random.choice(model.graph.initializer)
    weight.data_location = TensorProto.EXTERNAL
    if random.random() < 0.8:
        weight.ClearField("raw_data")
    places = ("w.bin", "model.onnx", "config.json", ".", "..", "../w.bin", "/dev/zero", "/etc/passwd", "", "w\0.bin")
    for key, values in (("location", places), ("offset", NUMBERS), ("length", NUMBERS), ("x", TEXTS)):
        if random.random() < 0.7:
            weight.external_data.add(key=key, value=str(random.choice(values)))


def _change_order(model: onnx.ModelProto, random: Random) -> None:
    """A node that takes what it, or a later one, makes; the same node twice; a weight with the name of a value."""
    nodes, way = model.graph.node, random.random()
    if not nodes:
        return
    first, second = sorted(random.randrange(len(nodes)) for _ in range(2))
    if way < 0.6 and nodes[first].input and nodes[second].output:
        nodes[first].input[random.randrange(len(nodes[first].input))] = random.choice(nodes[second].output)
    elif way < 0.8:
        nodes.add().CopyFrom(nodes[first])
    elif nodes[first].output:
        model.graph.initializer.add(name=random.choice(nodes[first].output), data_type=1, dims=[2], raw_data=b"\0" * 8)


def _change_functions(model: onnx.ModelProto, random: Random) -> None:
    """Some nodes become a function: whole, without its opsets, one that calls itself, or one that is there twice."""
    nodes = model.graph.node
    if not nodes:
        return
    place = random.randrange(len(nodes))
    moved = deepcopy(nodes[place])
    inside = random.choice((moved.op_type, "F", "F", moved.op_type))
    function = model.functions.add(name="F", domain=random.choice(("own", "own", "", "\x1b")), node=[moved])
    function.input.extend(dict.fromkeys(name for name in moved.input if name))
    function.output.extend(name for name in moved.output if name)
    function.node[0].op_type = inside
    function.node[0].domain = function.domain if inside == "F" else moved.domain
    function.opset_import.extend(model.opset_import if random.random() < 0.7 else [])
    if random.random() < 0.2:
        model.functions.add().CopyFrom(function)
    if random.random() < 0.8:
        model.opset_import.add(domain=function.domain, version=1)
    call = onnx.NodeProto(op_type="F", domain=function.domain, input=function.input, output=function.output)
    nodes[place].CopyFrom(call)


def _change_opsets(model: onnx.ModelProto, random: Random) -> None:
    """The opset of a domain, or the IR version: another one, none, two, of a domain that nobody has."""
    if random.random() < 0.3 and model.opset_import:
        random.choice(model.opset_import).version = random.choice((*NUMBERS, 1, 6, 9, 12, 13, 17, 21, 23, 26))
    elif random.random() < 0.4:
        domain = random.choice(("", "ai.onnx", "com.microsoft", *TEXTS))
        model.opset_import.add(domain=domain, version=random.randrange(30))
    elif random.random() < 0.5 and model.opset_import:
        del model.opset_import[random.randrange(len(model.opset_import))]
    else:
        model.ir_version = random.choice((*NUMBERS, *range(1, 14)))


WAYS: dict[str, Callable[[onnx.ModelProto, Random], None]] = {
    **dict.fromkeys(("bits", "cut", "not UTF-8", "side-cars", "fields"), _change_field),
    "shapes": _change_shape,
    "names": _change_name,
    "nodes": _change_node,
    "order": _change_order,
    "functions": _change_functions,
    "opsets": _change_opsets,
    "external data": _change_external,
}


def try_mutation(number: int, name: str) -> str | None:
    """Run a command (for `convert`, a conversion by the number) on a mutation; gives what went wrong with it."""
    conversion = CONVERSIONS[number % len(CONVERSIONS)]
    command = COMMANDS.get(name) or ("convert", "-o", "OUT", *LIMITS, *conversion, *JSON)
    with tempfile.TemporaryDirectory() as place:
        model, temporary = Path(place, "model"), Path(place, "temporary")
        temporary.mkdir()
        what = mutate(number, model)
        try:
            words = [str(Path(place, "out")) if word == "OUT" else word for word in command]
            own = {"TMPDIR": str(temporary)}
            with unchanged(model), patch.object(tempfile, "tempdir", str(temporary)), patch.dict(os.environ, own):
                result = call(words[0], model, *words[1:], seconds=SECONDS)
            wrong = WRONG.search(result.out + result.err)
            assert wrong is None, wrong
            of_the_model = str(model) in result.err or ".onnx'" in result.err
            assert result.code != 2 or of_the_model, f"a wrong call: {result.err}"
            left = {path.name for path in Path(place).iterdir()} - {"model", "out", "temporary"}
            assert not [*left, *temporary.iterdir()]
        except Exception as error:  # what is wrong is reported, and the next one is tried
            return f"{what}\n{''.join(traceback.format_exception(error)[-12:])[-6000:]}"
    return None


def main() -> int:
    """Try mutations, and print those that go wrong."""
    name, count, *first = sys.argv[1:]
    begin, failed = int(first[0]) if first else 0, 0
    for number in range(begin, begin + int(count)):
        if (problem := try_mutation(number, name)) is not None:
            failed += 1
            print(f"--- {name}\n{problem}", flush=True)
    print(f"{count} done, {failed} failed", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
