"""The files of a project: the program of a language under the chosen name, its contract, its vectors and a README.

`contract.json` has the plan (`plan.py`) as data, with what a program compares with the model when it opens it and the
token ids of its configs; `vectors.json` has runs to try. docs/loops.md describes both.
"""

import json
import keyword
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from kvdoctor._version import __version__
from kvdoctor.addons.loops.languages import Language
from kvdoctor.addons.loops.plan import Dim, LoopPlan
from kvdoctor.addons.loops.vectors import LoopTarget, ObservedLoop, Vector, list_runs
from kvdoctor.analysis.configs import decoder_config
from kvdoctor.analysis.model_folder import SideCars
from kvdoctor.decode.runs import WRONG, quote_error
from kvdoctor.errors import UsageError
from kvdoctor.records import record, to_plain
from kvdoctor.report.escaping import code
from kvdoctor.report.facts import StackFacts
from kvdoctor.report.wording.contract import describe_contract

WRITTEN = (
    *("slots", "source", "source_axis", "vocabulary", "context_limit", "one_token", "batch", "capacity_is_chosen"),
    *("pads", "chunks", "rewinds", "reorders", "placeholders"),
)
"""What `contract.json` has of a plan as it is."""
CONTRACT_FILE, VECTORS_FILE = "contract.json", "vectors.json"
CONTRACT_SCHEMA, VECTORS_SCHEMA = "kvdoctor/loop/2", "kvdoctor/loop-vectors/1"
ANY = -1
"""In place of an expected token, where several are right."""
WIDTH = 200
MOST_IDS = 4096
"""More than any list of suppressed ids has."""


def make_contract(target: LoopTarget, plan: LoopPlan) -> dict[str, Any]:
    """The content of `contract.json` for a plan of the target's model."""
    return {
        "schema": CONTRACT_SCHEMA,
        "tool": {"name": "kvdoctor", "version": __version__},
        "model": plan.model,
        "stack": target.stack,
        "layout": plan.layout,
        "files": [_describe_file(file, target, plan) for file in plan.files],
        "calls": {name: to_plain(getattr(plan, name)) for name in ("encode", "embed", "prefill", "decode")},
        **{name: to_plain(getattr(plan, name)) for name in WRITTEN},
        "generation": find_generation_ids(target.side_cars, plan),
    }


def _describe_file(file: str, target: LoopTarget, plan: LoopPlan) -> dict[str, Any]:
    calls = [call for call in plan.calls if call.file == file]
    pasts = {past for call in calls for past in call.pasts}
    taken: dict[str, tuple[str, tuple[Dim, ...]]] = {
        one.name: (one.dtype, one.dims) for call in calls for one in call.inputs
    }
    taken |= {slot.past: (slot.dtype, slot.dims) for slot in plan.slots if slot.past in pasts}
    return {
        "file": file,
        "external": list(target.external.get(file, ())),
        "inputs": {name: {"dtype": dtype, "dims": list(dims)} for name, (dtype, dims) in taken.items()},
        "outputs": list(dict.fromkeys(name for call in calls for name in call.outputs)),
    }


def find_generation_ids(configs: SideCars, plan: LoopPlan) -> dict[str, Any]:
    """The ids of generation_config.json, else of config.json: where a text begins and ends, and what is suppressed.

    `forced` are pairs of a position, counted from the first token of the prompt, and the id there.
    """
    parts = (configs.generation, configs.config, decoder_config(configs.config))

    def ids(key: str) -> list[int]:
        for part in parts:
            given = part.get(key)
            listed = given if isinstance(given, list) else [given]
            if given is not None and len(listed) <= MOST_IDS:
                return [one for one in listed if _is_token(one, plan)]
        return []

    forced = [pair for part in parts for pair in _list_forced(part, plan)]
    return {
        "start": (ids("decoder_start_token_id") if plan.source is not None else []) or ids("bos_token_id"),
        "end": ids("eos_token_id"),
        "padding": next(iter(ids("pad_token_id")), None),
        "suppress": ids("suppress_tokens"),
        "begin_suppress": ids("begin_suppress_tokens"),
        "forced": [list(pair) for pair in sorted(dict(reversed(forced)).items())],
    }


def _list_forced(part: Mapping[str, Any], plan: LoopPlan) -> Iterator[tuple[int, int]]:
    """Each position with the id that a config forces there."""
    pairs = part.get("forced_decoder_ids")
    for pair in (pairs if isinstance(pairs, list) else [])[:MOST_IDS]:
        if isinstance(pair, list) and len(pair) == 2 and _is_token(pair[1], plan) and type(pair[0]) is int:
            yield pair[0], pair[1]
    if _is_token(first := part.get("forced_bos_token_id"), plan):
        yield 1, first


def _is_token(value: Any, plan: LoopPlan) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < (plan.vocabulary or 1 << 31)


def make_vectors(vectors: tuple[Vector, ...]) -> dict[str, Any]:
    """The content of `vectors.json`: runs that a program plays, with the tokens that it must find.

    After the prompts, `follow` is fed token by token. `expect` has a row for each sequence, the likeliest token after
    the prompt and after each of these; -1 where several are right. A run with a `self_test` then takes its last step
    again: after a rewind of one token, and for `reorder` with the rows in the order n-1, ..., 1, 0, 0 as well. The
    `source` has token ids, or the file of an array (float32, little endian, C order) with its shape.
    """
    return {
        "schema": VECTORS_SCHEMA,
        "runs": [
            {
                "name": name,
                "prompts": [list(row) for row in vector.prompts],
                "follow": [list(row) for row in vector.follow],
                "source": {"file": vector.source_file, "shape": list(vector.source.shape)}
                if vector.source is not None
                else [list(row) for row in vector.sources] or None,
                "expect": [[ANY if token is None else token for token in row] for row in vector.expected],
                "self_test": name if name in vector.self_tests else None,
            }
            for name, vector in list_runs(vectors)
        ],
    }


def as_text(document: dict[str, Any]) -> str:
    """A document as JSON text in ASCII: what has room on a line stands on one, so that files can be compared."""
    return _lay_out(document, "") + "\n"


def _lay_out(value: Any, indent: str) -> str:
    short = json.dumps(value)
    if not isinstance(value, (dict, list)) or len(indent) + len(short) <= WIDTH:
        return short
    named = isinstance(value, dict)
    items = value.items() if isinstance(value, dict) else ((None, one) for one in value)
    inner = indent + "  "
    lines = [inner + (f"{json.dumps(name)}: " if named else "") + _lay_out(one, inner) for name, one in items]
    first, last = "{}" if named else "[]"
    return f"{first}\n" + ",\n".join(lines) + f"\n{indent}{last}"


PROGRAMS = Path(__file__).parent / "programs"
NOTES = "notes.md"
"""The part of a README that only one language has; it is not copied by itself."""
BUILT = {"__pycache__", "node_modules", "target", "build", "dist", "bin", "obj", "Cargo.lock"}
"""What compilers and tools leave in a program, with folders whose names begin with a dot."""
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", re.ASCII)
DEFAULT_NAME = "decode_loop"
RESERVED = (
    "abstract auto bool byte case char const core crate default delete do double dyn else enum export extern "
    "false final float fn for func goto if impl import int interface json let long loop main map match mod "
    "move mut namespace native new null numpy onnxruntime operator ort package private protected pub public "
    "range ref register self serde short signed sizeof static std string struct super switch template test "
    "this throw trait true type typedef typename union unsafe unsigned use using var virtual void volatile "
    "where "
)
TAKEN = frozenset(RESERVED.split())
"""Names that a language reserves, and names of packages: no program can have them."""
MOST_NAME = 40


@record
class Project:
    """What a project is written from."""

    language: Language
    target: LoopTarget
    observed: ObservedLoop
    name: str = DEFAULT_NAME


def make_files(project: Project) -> dict[str, str]:
    """The texts of a project, by their paths in it."""
    target, observed = project.target, project.observed
    return {
        **dict(_copy_program(project.language, project.name)),
        "README.md": make_readme(project),
        CONTRACT_FILE: as_text(make_contract(target, observed.plan)),
        VECTORS_FILE: as_text(make_vectors(observed.vectors)),
    }


def refuse_name(name: str) -> None:
    """Refuse a name that is none in some language.

    Raises:
        UsageError: it is not made of small letters, digits and single underscores, or a language or a package has it.
    """
    if name in TAKEN or keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise UsageError(f"--name {name!r} is reserved in a language, or the name of a package that the program uses")
    if NAME.fullmatch(name) is None or len(name) > MOST_NAME:
        raise UsageError(
            f"--name {name[:80]!r} must be at most {MOST_NAME} small letters, digits and single underscores"
        )


def _copy_program(language: Language, name: str) -> Iterator[tuple[str, str]]:
    """Each file of a program, its default name replaced: in paths and in texts, however it is spelled there."""
    folder = language.folder
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        left = inside.name in BUILT or any(part in BUILT or part.startswith(".") for part in inside.parts[:-1])
        if path.is_file() and inside.name != NOTES and not left:
            yield rename(inside.as_posix(), name), rename(path.read_text(encoding="utf-8"), name)


def rename(text: str, name: str) -> str:
    """The text with a name in place of `decode_loop`, `decode-loop`, `decodeloop`, `decodeLoop` and `DecodeLoop`."""
    forms = dict(zip(*map(_list_spellings, (DEFAULT_NAME, name)), strict=True))
    return re.sub("|".join(forms), lambda found: forms[found.group()], text)


def _list_spellings(name: str) -> tuple[str, ...]:
    first, *others = name.split("_")
    rest = "".join(map(str.capitalize, others))
    return name, name.replace("_", "-"), name.replace("_", ""), first + rest, first.capitalize() + rest


def make_readme(project: Project) -> str:
    """The README of a project: the common page with the parts that its contract and its language have."""
    plan = project.observed.plan
    page = (PROGRAMS / "README.md").read_text(encoding="utf-8")
    notes = (project.language.folder / NOTES).read_text(encoding="utf-8")
    left_out = {"Beams": not plan.reorders, "A second turn": not plan.chunks, "The source": plan.source is None}
    parts = ((part.partition("\n")[0].removeprefix("## "), part) for part in notes.split("\n## "))
    sections = [part for title, part in parts if not left_out.get(title)]
    facts = StackFacts(project.target.stack, project.target.contract.layout, plan.files, project.target.contract)
    vectors = project.observed.vectors
    values = {
        "title": project.language.title,
        "language": project.language.name,
        "model": code(plan.model),
        "layout": plan.layout,
        "version": __version__,
        "contract": "\n".join(f"| {label} | {code(text)} |" for label, text in describe_contract(facts)),
        "own": describe_own_loop(project),
        "rules": "\n".join(f"{at}. {text}" for at, text in enumerate(_list_rules(plan), 1)),
        "notes": rename("\n## ".join(sections).strip(), project.name),
        "example": vectors[0].example if vectors else "--prompt 5,6,7",
        "consumer": " --consumer held" if any(slot.carry == "hold" for slot in plan.slots) else "",
        "source": SOURCE_FILE if vectors and vectors[0].source is not None else "",
    }

    def expand(text: str) -> str:
        return re.sub(r"@(\w+)@", lambda found: values.get(found.group(1), found.group()), text)

    values["notes"] = expand(values["notes"])  # the name of a model may look like a value
    page = expand(page)
    return re.sub(r"\n{3,}", "\n\n", page)


SOURCE_FILE = """`source-1.f32` is an input of the encoder to try the program with: random numbers, float32, little
endian. `vectors.json` has its shape."""


def _list_rules(plan: LoopPlan) -> Iterator[str]:
    if plan.one_token:
        yield "Every call takes one token, of the prompt too."
    else:
        later = "only the new tokens" if plan.chunks else "one new token: several at once are not right with this model"
        yield f"The first call takes the whole prompt; every later call takes {later}."
    if any(slot.carry == "hold" for slot in plan.slots):
        yield (
            "What is made once for a sequence (the cross-attention cache) is held. What later calls return in its "
            "place is not read: some exports return it without elements."
        )
    else:
        by_rule = ", by the rules above" if plan.copies else ""
        yield f"What a call returns of the cache goes into the next call{by_rule}."
    if not plan.rewinds:
        yield "It cannot go back: a part of this cache has no earlier length. Begin anew, or hold copies of your own."
    if plan.pads:
        yield "Prompts of different lengths are padded on the left, masked, and not counted in the positions."
    elif plan.batch is None:
        yield "The prompts of a batch must have the same length: padding is not right with this model."
    if plan.placeholders:
        ids = ", ".join(map(str, plan.placeholders))
        yield f"It decodes text. The tokens {ids} stand for images or audio, and are refused."


def describe_own_loop(project: Project) -> str:
    """What the usual loop does wrong with this model, and the line that changes; empty where it is right."""
    plain = project.observed.plain
    held = [slot for slot in project.observed.plan.slots if slot.carry == "hold" and slot.made is not None]
    if plain is None or plain is project.observed.held or plain.outcome not in WRONG or not held:
        return ""
    emptied = any(slot.emptied for slot in project.target.contract.slots) or any(step.empty for step in plain.steps)
    first, step = held[0], f" at step {plain.failed_step}" if plain.failed_step is not None else ""
    said = {
        "failed": f"It fails{step}: {code(quote_error(plain.error or 'no message').rstrip('.'))}.",
        "died": "The runtime ends the process.",
    }
    return OWN_LOOP.format(
        failure=said.get(plain.outcome, "It decodes other tokens, without an error."),
        finding=" The finding is KV203, `cross-cache-emptied`: later calls return these outputs empty."
        if emptied
        else "",
        past=code(first.past),
        made=code(str(first.made)),
        maker="the encoder" if first.by_encoder else "the first call",
        others=f" The same goes for {len(held) - 1} more inputs." if len(held) > 1 else "",
        names=", ".join(code(slot.past) for slot in held[:MOST_NAMED]) + ", ..." * (len(held) > MOST_NAMED),
    )


MOST_NAMED = 4
OWN_LOOP = """## What is wrong in a loop that feeds every output back

{failure}{finding}

Where your loop makes the inputs of the next call from the outputs of the last one, leave out {names}: {past} is
fed what {maker} returned as {made}, in every later call.{others}"""
