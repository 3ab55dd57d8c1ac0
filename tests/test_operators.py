"""An operator is described in one table; what else names one is listed here, each place with its reason.

What counts: a comparison with the name of an operator, or with a list of such names, and every set, list, tuple or
mapping that is written with one. Nodes that are made (`NodeProto(op_type="Reshape")`, `make_node`) do not.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from onnx import defs
from support.text_fixtures import load_all

from kvdoctor.model.operators import OPERATORS, Trait, has, ports_of

PACKAGE = Path(__file__).parents[1] / "kvdoctor"

OWN = ("model/operators.py", "model/operator_axes.py")
"""The table itself, and the rules for axes and numbers, one for each kind of operator."""

MOST_COMPARISONS = 60

COMPUTING = ("arithmetic", "attention", "combining", "indexing", "shaping")
PROVING = ("attention", "combining", "elementwise", "masks", "parts", "shaping")
OUTSIDE = {
    **{f"analysis/proof/{name}.py": "the position type of what each operator returns" for name in PROVING},
    **{f"analysis/abstract_run/{name}.py": "computes each operator" for name in COMPUTING},
    "analysis/abstract_run/graph_run.py": "an Exp may be part of a softmax",
    "analysis/arithmetic/reading.py": "normalizations, routers and biases, as exporters write them",
    "analysis/arithmetic/numbers.py": "computes constants, activations and caps, as exporters write them",
    "analysis/arithmetic/rotary.py": "rotations, as exporters write them",
    "analysis/arithmetic/scores.py": "scores of an attention, as exporters write them",
    "analysis/axes.py": "attentions that take queries apart by their attribute num_heads",
    "analysis/dataflow/states.py": "a ScatterND has no axis: its index tells along which it writes",
    "analysis/dataflow/uses.py": "an Exp is a softmax where its result is divided by its sum",
    "analysis/embedding_graphs.py": "part of a name: attentions of any maker",
    "analysis/feature_encoders.py": "of the comparisons, an Equal alone tests for one number",
    "analysis/lm_head.py": "a MatMulInteger has zero points among its operands; the bounds of a Slice",
    "analysis/search_operators.py": "the inputs of each search operator, in order",
    "analysis/thresholds.py": "reads the bounds of a Slice",
    "decode/search.py": "computes the search that an operator stands for",
    "diagnose/checks/side_cars/compare_values.py": "activations by a fused operator; slopes of ALiBi",
    "diagnose/checks/side_cars/graph_sizes.py": "reads attributes and the table of cosines of rotations and attentions",
    "diagnose/float32/rounding.py": "writes operators on integers as those on real numbers, one by one",
    "diagnose/locate/failing_node.py": "what operators demand of sizes and numbers, one by one",
    "diagnose/locate/runnable.py": "makes nodes",
    "diagnose/examine.py": "documented behavior of one operator",
    "model/flow.py": "a Loop and a Scan order their inputs in two ways",
    "model/validity.py": "operators that ONNX Runtime has under the standard domain",
    "model/precision.py": "reads an attribute of MatMulNBits",
    "model/traverse.py": "the table needs it",
    "model/view.py": "a Not reverses a switch",
    "addons/conversions/graphs/cache_type.py": "rewrites a Concat, ScatterND or TensorScatter",
    "addons/conversions/graphs/growing_cache.py": "the cache of GroupQueryAttention",
    "addons/conversions/graphs/length_uses.py": "rewrites the bounds of a Slice",
    "addons/conversions/graphs/static_cache.py": "rewrites Attention of ONNX",
    "addons/conversions/graphs/token_axes.py": "norms along the axes after one or along the last, ways to pick",
    "addons/conversions/layouts/encoders.py": "reads which number of a shape a Slice or Gather takes",
    "repair/lowering/lower.py": "defaults of attributes, by operator",
    "repair/lowering/opset.py": "what onnx's converter does, and versions that give an operator another meaning",
    "repair/repairs/slots.py": "writes a Cast",
    "repair/repairs/values.py": "rewrites a Range, Slice or Trilu",
    "repair/shapes/freeing.py": "rewrites the target of a Reshape or Expand",
    "repair/shapes/walk.py": "a Reshape and an Expand bind lengths to their targets; a Range is rewritten",
    "repair/shapes/writing.py": "an Expand and an Unsqueeze broadcast, a Tile and a Reshape do not; reads a GatherND",
}
"""Modules that name operators, and why the table does not answer there."""


def _named(node: ast.expr) -> list[str]:
    """The names of operators that an expression is, or that stand in it as elements or keys."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) and node.value in OPERATORS else []
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return [name for element in node.elts for name in _named(element)]
    if isinstance(node, ast.Dict):
        return [name for key in node.keys if key is not None for name in _named(key)]
    return _named(node.value) if isinstance(node, ast.Starred) else []


def _find_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The kind and line of each comparison and table; of tables within one another the outermost."""
    counted = set[int]()
    for node in ast.walk(tree):  # what is around comes first
        if isinstance(node, ast.Compare | ast.MatchValue):
            kind, parts = "comparison", [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        elif isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict) and id(node) not in counted:
            kind, parts = "table", [node]
        else:
            continue
        if named := [part for part in parts if _named(part)]:
            yield kind, node.lineno
            counted |= {id(inner) for part in named for inner in ast.walk(part)}


@cache
def _names_outside() -> dict[str, list[tuple[str, int]]]:
    found = {}
    for path in sorted(path for path in PACKAGE.rglob("*.py") if "programs" not in path.parts):
        name = path.relative_to(PACKAGE).as_posix()
        here = list(_find_names(ast.parse(path.read_text(encoding="utf-8")))) if name not in OWN else []
        if here:
            found[name] = here
    return found


def test_what_else_names_operators_is_listed_with_its_reason() -> None:
    found = _names_outside()
    assert {name: lines for name, lines in found.items() if name not in OUTSIDE} == {}
    assert OUTSIDE.keys() - found.keys() == set(), "these name none any more"


def test_few_comparisons_are_left() -> None:
    comparisons = [place for places in _names_outside().values() for place in places if place[0] == "comparison"]
    assert len(comparisons) < MOST_COMPARISONS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('node.op == "Concat"', ["comparison"]),
        ('node.op in ("Concat", "Split")', ["comparison"]),
        ('JOINS = {"Concat": 1, "past": 2}', ["table"]),
        ('VIEWS = {*("Reshape", "Squeeze"), *others}', ["table"]),
        ('NodeProto(op_type="Concat")', []),
        ('helper.make_node("Concat", ["a"], ["b"])', []),
        ('role == "past"', []),
    ],
)
def test_what_counts_as_a_name(text: str, expected: list[str]) -> None:
    assert [kind for kind, _ in _find_names(ast.parse(text))] == expected


def test_every_operator_of_onnx_has_an_entry() -> None:
    standard = {schema.name for schema in defs.get_all_schemas() if not schema.domain}
    assert standard - OPERATORS.keys() == set()


def test_the_table_uses_the_traits_that_are_declared() -> None:
    used = {trait for entry in OPERATORS.values() for trait in entry.traits}
    assert used == set(get_args(Trait))


def test_places_of_inputs_agree() -> None:
    for name, entry in OPERATORS.items():
        assert all(entry.takes_content(index) for index in (*entry.keeps, *entry.buffers, *entry.operands)), name
        assert has(name, "write") == bool(entry.new), name
        assert has(name, "product") == bool(entry.operands), name


def test_one_name_has_the_ports_of_its_domain() -> None:
    found = [ports_of(domain, "Attention") for domain in ("ai.onnx", "com.microsoft", "com.example")]
    assert [list(ports.pasts) if ports is not None else None for ports in found] == [[4, 5], [4], None]


MADE_UP = "MadeUpRescaling"
PROGRAM = """
import sys
from kvdoctor.model import operators
if sys.argv[2] == "with":
    operators.OPERATORS[sys.argv[3]] = operators.Operator(frozenset({"normalize"}), "first")
from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
folder = open_folder(sys.argv[1])
print(*sorted({slot.part for slot in read_contract(folder.stacks[0], folder.side_cars).slots}))
"""
"""Reads a contract after an operator was entered, before any walker has asked the table."""


@pytest.mark.parametrize(("entry", "parts"), [("with", "key value"), ("without", "value")])
def test_a_new_operator_is_one_entry(entry: str, parts: str, tmp_path: Path) -> None:
    """An operator between the cache and its attention, which no walker names, is followed once the table has it."""
    folder = load_all()["newest-operators-healthy"].write(tmp_path)
    path = folder / "model.onnx"
    path.write_bytes(path.read_bytes().replace(b"LpNormalization", MADE_UP.encode()))
    command = [sys.executable, "-c", PROGRAM, str(folder), entry, MADE_UP]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == parts, done.stderr
