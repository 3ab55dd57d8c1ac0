"""Decodings along the same tokens that are compared: golden numbers, and the variants in a folder.

Golden numbers are what a healthy model returned, stored in a small file. `record_golden` writes it, `step-test
--against` and `gate` compare with it. The tokens and the seed are those of the file, so that the model may have another
layout, other names, another arithmetic or another runtime since. A `ModelSize` shows that a file is of the same model.

Variants (`model.onnx`, `model_q4.onnx`) are graded by the most exact one. That gives facts, not findings: the user
decides which difference is too large (`diff --agree`). What runs a model raises `KvdoctorError` where the worker cannot
start ONNX Runtime.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from kvdoctor._version import __version__
from kvdoctor.analysis.model_folder import ModelFolder
from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.contract import CacheContract, Exactness
from kvdoctor.decode.golden import (
    MOST_STATES,
    GoldenWalk,
    check_recorded,
    checksum_draws,
    correlate_samples,
    count_calls,
    find_difference,
    measure_worst,
)
from kvdoctor.decode.messages import Digested, DigestJob, Graded, GradeJob, PairedSide
from kvdoctor.decode.side_files import read_side_file
from kvdoctor.decode.tolerances import TOLERANCES, UNLIKE, find_tolerance
from kvdoctor.diagnose.context import ContractContext, GoldenComparison
from kvdoctor.diagnose.not_checked import find_unmet_preconditions
from kvdoctor.errors import CannotCheck, UsageError
from kvdoctor.model.precision import ROUNDED
from kvdoctor.options import Options
from kvdoctor.records import from_plain, record, to_plain
from kvdoctor.report.facts import VariantFacts
from kvdoctor.report.wording import format_count
from kvdoctor.runtime.client import Runtime

SCHEMA, MOST_BYTES = "kvdoctor/golden/1", 64 << 20
"""The version of the form of a file, and its bytes at most: a model of 500 layers needs a fiftieth."""
CODE = "KV321"
START, MOST_START = re.compile(rb'\s*\{\s*"schema"\s*:\s*"kvdoctor/golden/'), 4096
"""How a file begins, whatever indents it, and where that is looked for."""


@record
class ModelSize:
    """What no export of a model changes: the tokens of its vocabulary, its layers, and the kinds of its caches."""

    vocabulary: int | None
    layers: int
    kinds: str

    def describe(self) -> str:
        """`96 tokens, 2 layers, self-attention`."""
        return f"{self.vocabulary or 'an open number of'} tokens, {format_count(self.layers, 'layer')}, {self.kinds}"


def measure_size(contract: CacheContract) -> ModelSize:
    """Return the size of the model of a contract."""
    kinds = ", ".join(sorted({slot.kind for slot in contract.slots}))
    stacked = [slot.size("layers") or 1 for slot in contract.slots if "layers" in slot.axes]
    single = {slot.layer for slot in contract.slots if "layers" not in slot.axes}
    return ModelSize(contract.vocabulary, max(stacked, default=0) + len(single), kinds)


@record
class GoldenStack:
    """What a file keeps of one stack.

    `states` are the encoder states of every decoding, `draws` is a checksum of the random numbers that the feeds are
    made of. `weights` says how the weights are stored, empty for floating point.
    """

    name: str
    size: ModelSize
    exactness: Exactness
    weights: str
    states: int
    draws: int
    walks: tuple[GoldenWalk, ...]


@record
class Golden:
    """What is in a file of golden numbers: JSON, begun by the schema. `file` is its name in messages."""

    schema: str
    kvdoctor: str
    onnxruntime: str
    model: str
    seed: int
    stacks: tuple[GoldenStack, ...]
    file: str = ""

    @property
    def words(self) -> str:
        """What it is, as text: `golden.json (marian, onnxruntime 1.31.1)`."""
        return f"{self.file} ({self.model}, onnxruntime {self.onnxruntime})"


def is_golden(path: str) -> bool:
    """Whether a file holds golden numbers, of whatever version; it may be a model as well."""
    if Path(path).is_file():
        with contextlib.suppress(OSError), Path(path).open("rb") as file:
            return START.match(file.read(MOST_START)) is not None
    return False


def read_golden(path: str) -> Golden:
    """Read a file of golden numbers; raises `UsageError` where it cannot be read, or is no such file."""
    if not Path(path).is_file():
        raise UsageError(f"{path!r} is no file; `kvdoctor record MODEL -o FILE` writes golden numbers")
    try:
        golden = replace(from_plain(Golden, json.loads(read_side_file(Path(path), MOST_BYTES))), file=path)
        for stack in golden.stacks:
            if not 0 <= stack.states <= MOST_STATES:
                raise ValueError("the encoder states are no count")  # noqa: TRY301 - said with the file's name below
            for walk in stack.walks:
                check_recorded(walk, stack.size.vocabulary)
        if golden.schema != SCHEMA or golden.seed < 0 or not all(stack.walks for stack in golden.stacks):
            raise ValueError(f"it is not of the schema {SCHEMA}")  # noqa: TRY301
    except (ValueError, OSError, RecursionError) as error:
        anew = "`kvdoctor record` writes them anew"
        raise UsageError(f"{path!r} holds no golden numbers that can be read: {error}; {anew}") from None
    return golden


def render_golden(model: str, stacks: tuple[GoldenStack, ...], seed: int, onnxruntime: str) -> bytes:
    """The content of a file of golden numbers."""
    content = json.dumps(to_plain(Golden(SCHEMA, __version__, onnxruntime, model, seed, stacks)))
    # JSON has no infinity; a number beyond every range is read as one.
    return (re.sub(r"(?<=[\[ ])(-?)Infinity(?=[,\]])", r"\g<1>1e999", content) + "\n").encode("ascii")


def digest_stack(
    stack: StackFiles, contract: CacheContract, folder: Path, options: Options, runtime: Runtime
) -> GoldenStack:
    """Decode with a stack, and keep the digests; raises `CannotCheck` where it cannot be decoded."""
    if unmet := next(find_unmet_preconditions(stack, contract), None):
        raise CannotCheck(unmet)
    side = PairedSide(stack.name, folder, contract)
    done = _run(DigestJob(side, seed=options.seed, provider=options.provider), runtime)
    size, weights = measure_size(contract), describe_rounding(stack)
    return GoldenStack(stack.name, size, contract.exactness, weights, done.states, done.draws, done.walks)


def compare_with_golden(
    context: ContractContext, golden: Golden, options: Options, runtime: Runtime
) -> GoldenComparison:
    """Decode with a stack along the golden tokens, and compare; raises `CannotCheck` where no golden stack fits."""
    contract, stack = context.contract, context.stack
    stored = _select_stack(context, golden)
    job = DigestJob(context.side, stored.walks, stored.states, seed=golden.seed, provider=options.provider)
    done = _run(job, runtime)
    limits = (find_tolerance(name, options.tolerances) for name in (contract.exactness, stored.exactness))
    limit = max(limits, key=lambda one: one.passes)
    pairs = [(one, stored.walks[number]) for one, number in zip(done.walks, done.numbers, strict=True)]
    difference = find_difference(pairs, (limit.passes, limit.fails))
    calls = sum(count_calls(one, other) for one, other in pairs)
    words = f"{calls} calls of {len(pairs)} decodings against {golden.words}"
    if len(pairs) < len(stored.walks):
        words += f", of the {len(stored.walks)} in it"
    if difference is not None and describe_rounding(stack) != stored.weights:
        correlation = round(sum(correlate_samples(one, other) for one, other in pairs) / len(pairs), 4)
        words += f": the weights are quantized differently, the correlation of the logits is {correlation:.3f}"
        return GoldenComparison(golden.words, limit, words, difference if correlation < UNLIKE else None, correlation)
    worst = max(measure_worst(one, other) for one, other in pairs)
    words += f": logits within {worst:.1e} standard deviations; {limit.passes:g} are allowed"
    return GoldenComparison(golden.words, limit, words, difference)


def describe_rounding(stack: StackFiles) -> str:
    """The operators of a stack that compute with rounded weights, each with its bits; empty for floating point."""
    found = set()
    for file in stack.files.values():
        for scope in file.view.scopes() if file.view is not None else ():
            for node in scope.graph.node:
                if ROUNDED.search(node.op_type):
                    bits = next((attribute.i for attribute in node.attribute if attribute.name == "bits"), None)
                    found.add(f"{node.op_type}{'' if bits is None else f' {bits} bits'}")
    return ", ".join(sorted(found))


def _select_stack(context: ContractContext, golden: Golden) -> GoldenStack:
    """The stack of the same name, else the first with the same sizes, another layout; `CannotCheck` without one."""
    contract, size = context.contract, measure_size(context.contract)
    if not contract.slots:
        raise CannotCheck("there is no cache contract")
    same = [one for one in golden.stacks if one.size == size]
    if not same:
        others = "; ".join(one.size.describe() for one in golden.stacks)
        raise CannotCheck(f"it is of another model: {others}; this one has {size.describe()}")
    stored = next((one for one in same if one.name == context.stack.name), same[0])
    if checksum_draws(golden.seed) != stored.draws:
        reason = "the installed numpy generates other random numbers than the one that recorded it; record it again"
        raise CannotCheck(reason)
    if contract.encoder_length not in (None, stored.states):
        raise CannotCheck(f"it was fed {stored.states} encoder states, and this model takes {contract.encoder_length}")
    return stored


def _run(job: DigestJob, runtime: Runtime) -> Digested:
    """Carry out a job; raises `CannotCheck` where its first walk was not run."""
    answers, failed = runtime.answer(job, Digested)
    failed = failed or (answers[0].failed if answers else "there was no answer")
    if failed:
        raise CannotCheck(failed)
    return answers[0]


def grade_variants(
    folder: ModelFolder, contracts: Mapping[str, CacheContract], options: Options, runtime: Runtime
) -> Iterator[VariantFacts]:
    """The variants in a folder, each run with the base of its group."""
    for base, variants in _find_variants(folder.stacks, contracts):
        ours, *theirs = (PairedSide(one.name, folder.root.absolute(), contracts[one.name]) for one in (base, *variants))
        job = GradeJob(ours, tuple(theirs), seed=options.seed, provider=options.provider)
        answers, failed = runtime.answer(job, Graded)
        graded = {one.stack: one for one in answers}  # without those after which the worker ended
        missing = f"no comparison: {failed or 'there was no answer'}"
        for variant in variants:
            found = graded.get(variant.name) or Graded(variant.name, failed=missing)
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


def _find_variants(
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


def _count_bytes(stack: StackFiles) -> int:
    """The files of a stack on disk; external weights that several of them share count once."""
    external = {one.path: one.bytes or 0 for file in stack.members for one in file.external}
    inside = (file.skeleton.bytes_on_disk for file in stack.members if file.skeleton is not None)
    return sum(inside) + sum(external.values())
