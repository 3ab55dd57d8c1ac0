"""The files of a project: the program of a language under the chosen name, its contract, its vectors and a README."""

import keyword
import re
from collections.abc import Iterator
from pathlib import Path

from kvdoctor._version import __version__
from kvdoctor.addons.loops.contract_file import CONTRACT_FILE, VECTORS_FILE, as_text, make_contract, make_vectors
from kvdoctor.addons.loops.languages import Language
from kvdoctor.addons.loops.plan import LoopPlan
from kvdoctor.addons.loops.vectors import LoopTarget, ObservedLoop
from kvdoctor.decode.runs import WRONG, Run, quote_error
from kvdoctor.errors import UsageError
from kvdoctor.records import record
from kvdoctor.report.escaping import code
from kvdoctor.report.facts import StackFacts
from kvdoctor.report.wording.contract import describe_contract

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
    forms = dict(zip(_list_spellings(DEFAULT_NAME), _list_spellings(name), strict=True))
    return re.sub("|".join(forms), lambda found: forms[found.group()], text)


def _list_spellings(name: str) -> tuple[str, ...]:
    parts = name.split("_")
    pascal = "".join(part.capitalize() for part in parts)
    return name, "-".join(parts), "".join(parts), parts[0] + pascal[len(parts[0]) :], pascal


def make_readme(project: Project) -> str:
    """The README of a project: the common page with the parts that its contract and its language have."""
    plan = project.observed.plan
    page = (PROGRAMS / "README.md").read_text(encoding="utf-8")
    notes = (project.language.folder / NOTES).read_text(encoding="utf-8")
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
        "notes": rename("\n- **".join(_list_sections(notes, plan)).strip(), project.name),
        "example": vectors[0].example if vectors else '[{"call": "generate", "rows": [[5, 6, 7]]}]',
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


def _list_sections(notes: str, plan: LoopPlan) -> Iterator[str]:
    """The points of a language's notes, without those on what the contract does not offer."""
    left_out = {
        "Beams": not plan.reorders,
        "A second turn": not plan.chunks,
        "Going back": not plan.rewinds,
        "The source": plan.source is None,
    }
    yield from (part for part in notes.split("\n- **") if not left_out.get(part.partition("**")[0]))


def _list_rules(plan: LoopPlan) -> Iterator[str]:
    """What a loop of this model must do."""
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
        by_rule = ", by the rules above" if any(slot.copies for slot in plan.slots) else ""
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
    first = held[0]
    return OWN_LOOP.format(
        failure=_describe_failure(plain),
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


def _describe_failure(plain: Run) -> str:
    """The outcome of the loop that feeds everything back, with the end of the runtime's message."""
    if plain.outcome == "failed":
        step = f" at step {plain.failed_step}" if plain.failed_step is not None else ""
        return f"It fails{step}: {code(quote_error(plain.error or 'no message').rstrip('.'))}."
    if plain.outcome == "died":
        return "The runtime ends the process."
    return "It decodes other tokens, without an error."
