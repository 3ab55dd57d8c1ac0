"""Other models that are compared token by token: the variants in a folder, and the draft of speculative decoding.

Variants (`model.onnx`, `model_q4.onnx`) are graded by the most exact one. A token of a draft is accepted where it is
also the most likely one of the model, so the share of these positions is what to expect. Both are facts, not findings:
the user decides which difference is too large (`diff --agree`), and whether a draft pays.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import MOST_TOKENIZER_BYTES, ModelFolder, open_folder, read_object
from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.contract import CacheContract
from kvdoctor.decode.messages import Graded, GradeJob, PairedSide
from kvdoctor.decode.tolerances import TOLERANCES
from kvdoctor.diagnose.context import DraftModel
from kvdoctor.errors import UsageError, as_argument
from kvdoctor.model.files import side_car_folder
from kvdoctor.options import Options
from kvdoctor.report.facts import DraftFacts, VariantFacts
from kvdoctor.runtime.client import Runtime

PROMPTS = 4
"""Prompts that are decoded, unless the user gives one."""


def grade_variants(
    folder: ModelFolder, contracts: Mapping[str, CacheContract], options: Options, runtime: Runtime
) -> Iterator[VariantFacts]:
    """The variants in a folder, each run with the base of its group.

    Raises:
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    for base, variants in find_variants(folder.stacks, contracts):
        ours, *theirs = (PairedSide(one.name, folder.root.absolute(), contracts[one.name]) for one in (base, *variants))
        job = GradeJob(ours, tuple(theirs), seed=options.seed, provider=options.provider)
        graded = run_grades(job, runtime)
        for variant in variants:
            found = graded[variant.name]
            known = not found.failed
            yield VariantFacts(
                stack=variant.name,
                base=base.name,
                bytes=_count_bytes(variant),
                base_bytes=_count_bytes(base),
                tokens=found.tokens,
                divergence=found.divergence if known else None,
                same_top1=found.same_top1 if known else None,
                first_other=found.first_other,
                layers=found.layers,
                reason=found.failed or None,
            )


def find_variants(
    stacks: Iterable[StackFiles], contracts: Mapping[str, CacheContract]
) -> Iterator[tuple[StackFiles, tuple[StackFiles, ...]]]:
    """Stacks that are one model by names, kind and sizes: the base, the most exact and largest, and the others."""
    groups: dict[object, list[StackFiles]] = {}
    for stack in stacks:
        contract = contracts[stack.name]
        if contract.slots and not contract.missing:
            stem = stack.main.name.removesuffix(".onnx").removesuffix(stack.main.suffix)
            layers = len(contract.slots)
            groups.setdefault((stem, stack.kind, contract.vocabulary, contract.codebooks, layers), []).append(stack)
    for group in groups.values():
        limits = {one.name: TOLERANCES[contracts[one.name].exactness].passes for one in group}
        base, *others = sorted(group, key=lambda one: (limits[one.name], -_count_bytes(one), one.name))
        if others:
            yield base, tuple(others)


def run_grades(job: GradeJob, runtime: Runtime) -> dict[str, Graded]:
    """The grade of each variant; where the worker ends, of those that it had not graded that it did."""
    answers, failed = runtime.answer(job, Graded)
    found = {one.stack: one for one in answers}
    missing = f"no comparison: {failed or 'there was no answer'}"
    return {side.stack: found.get(side.stack) or Graded(side.stack, failed=missing) for side in job.variants}


def _count_bytes(stack: StackFiles) -> int:
    """The files of a stack on disk; external weights that several of them share count once."""
    beside = {one.path: one.bytes or 0 for file in stack.members for one in file.external}
    inside = (file.skeleton.bytes_on_disk for file in stack.members if file.skeleton is not None)
    return sum(inside) + sum(beside.values())


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
    """The ids of the tokens in the tokenizer.json of a model; None without a file of the known form."""
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
        seed, prompt = options.seed + number, options.prompt_ids
        job = GradeJob(target, (side,), seed=seed, provider=options.provider, prompt=prompt)
        found = run_grades(job, runtime)[side.stack]
        if found.failed:
            return DraftFacts(target.stack, draft.shown, prompts, reason=found.failed)
        tokens += found.tokens
        accepted += round(found.same_top1 * found.tokens)
    return DraftFacts(target.stack, draft.shown, prompts, bool(options.prompt_ids), tokens, accepted)
