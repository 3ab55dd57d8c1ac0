"""The draft of speculative decoding: another model that proposes tokens, and how many of them the model accepts.

With greedy decoding a draft's token is accepted where it is the likeliest of the model as well, so the share of such
positions is what to expect. It is a fact, not a finding: whether it pays depends on the cost of both.
"""

from dataclasses import replace
from pathlib import Path

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import MOST_TOKENIZER_BYTES, open_folder, read_object
from kvdoctor.decode.messages import GradeJob, PairedSide
from kvdoctor.diagnose.context import DraftModel
from kvdoctor.diagnose.variants import run_grades
from kvdoctor.errors import UsageError, as_argument
from kvdoctor.model.files import side_car_folder
from kvdoctor.options import Options
from kvdoctor.report.facts import DraftFacts
from kvdoctor.runtime.client import Runtime

PROMPTS = 4
"""Prompts that are decoded, unless the user gives one."""


def open_draft(path: str) -> DraftModel:
    """Read the contract of a draft.

    Raises:
        UsageError: there is nothing at the path, or no decoder with a cache that can be driven.
    """
    folder = open_folder(path)
    for stack in folder.stacks:
        contract = read_contract(stack, folder.side_cars)
        if contract.slots and not contract.missing and contract.no_decoder is None and stack.kind != "unpaired":
            side = PairedSide(stack.name, folder.root.absolute(), contract)
            return DraftModel(path, side, read_tokens(folder.root))
    raise UsageError(
        f"--draft {path}: it holds no decoder with a cache that can be run (kvdoctor inspect {as_argument(path)})"
    )


def read_tokens(root: Path) -> dict[str, int] | None:
    """The ids of the tokens in the tokenizer.json beside a model; None without a file of the known form."""
    held, _ = read_object(side_car_folder(root) / "tokenizer.json", MOST_TOKENIZER_BYTES)
    try:
        known = held["model"]["vocab"]
        tokens = dict(known) if isinstance(known, dict) else {entry[0]: index for index, entry in enumerate(known)}
        tokens |= {entry["content"]: entry["id"] for entry in held.get("added_tokens") or ()}
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    usable = all(isinstance(token, str) and type(number) is int for token, number in tokens.items())
    return tokens if tokens and usable else None


def find_other_token(ours: dict[str, int], theirs: dict[str, int]) -> tuple[int, str, str] | None:
    """The first id that means another token to a draft, with both tokens; empty text where it has none."""
    mine, other = ({number: token for token, number in tokens.items()} for tokens in (ours, theirs))
    different = (n for n in sorted({*mine, *other}) if mine.get(n) != other.get(n))
    return next(((n, mine.get(n, ""), other.get(n, "")) for n in different), None)


def grade_draft(target: PairedSide, draft: DraftModel, options: Options, runtime: Runtime) -> DraftFacts:
    """Decode greedily with the target, and ask the draft for each next token.

    Raises:
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    if draft.contract.has_encoder and not target.contract.has_encoder:
        reason = "the draft takes the states of an encoder, and the model has none"
        return DraftFacts(target.stack, draft.shown, PROMPTS, reason=reason)
    side = replace(draft.side, stack=f"draft {draft.side.stack}")
    prompts = 1 if options.prompt_ids else PROMPTS
    tokens = accepted = 0
    for number in range(prompts):
        job = GradeJob(
            target, (side,), seed=options.seed + number, provider=options.provider, prompt=options.prompt_ids
        )
        found = run_grades(job, runtime)[side.stack]
        if found.failed:
            return DraftFacts(target.stack, draft.shown, prompts, reason=found.failed)
        tokens += found.tokens
        accepted += round(found.same_top1 * found.tokens)
    return DraftFacts(target.stack, draft.shown, prompts, bool(options.prompt_ids), tokens, accepted)
