"""Golden numbers: what a healthy model returned, stored in a small file, is compared with what it returns now.

`record_golden` writes the file, `step-test --against` and `gate` compare with it. The tokens and the seed are those of
the file, so that the model may have another layout, other names, another arithmetic or another runtime since. A
`ModelSize` is what shows that an earlier file is of the same model.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from kvdoctor._version import __version__
from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.contract import CacheContract
from kvdoctor.decode.golden import (
    GoldenWalk,
    check_recorded,
    checksum_draws,
    correlate,
    count_calls,
    find_difference,
    from_arrays,
    from_text,
    measure_worst,
    pack,
    to_arrays,
    to_text,
    unpack,
)
from kvdoctor.decode.messages import Digested, DigestJob, PairedSide
from kvdoctor.decode.tolerances import TOLERANCES, UNLIKE, find_tolerance
from kvdoctor.diagnose.context import ContractContext, GoldenComparison
from kvdoctor.diagnose.not_checked import find_unmet_preconditions
from kvdoctor.errors import CannotCheck, UsageError
from kvdoctor.model.precision import ROUNDED
from kvdoctor.options import Options
from kvdoctor.records import record
from kvdoctor.report.wording import format_count
from kvdoctor.runtime.client import Runtime
from kvdoctor.runtime.scratch import scratch_folder

SCHEMA = "kvdoctor/golden/1"
HEAD = "golden"
"""The name of the array with the facts on the file, as JSON."""
CODE = "KV321"


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

    `kinds` are those of the slots, `layers` counts the layers with a cache, `states` are the encoder states of every
    decoding, `draws` is a checksum of the random numbers that the feeds are made of. `weights` says how the weights are
    stored, empty for floating point.
    """

    name: str
    vocabulary: int | None
    kinds: str
    layers: int
    exactness: str
    weights: str
    states: int
    draws: int
    walks: tuple[GoldenWalk, ...]


@record
class Golden:
    """A file of golden numbers. `file` is its name in messages."""

    file: str
    model: str
    onnxruntime: str
    seed: int
    stacks: tuple[GoldenStack, ...]

    @property
    def words(self) -> str:
        """What it is, as text: `golden.npz (marian, onnxruntime 1.31.1)`."""
        return f"{self.file} ({self.model}, onnxruntime {self.onnxruntime})"


def read_golden(path: str) -> Golden:
    """Read a file of golden numbers.

    Raises:
        UsageError: it cannot be read, or is no such file.
    """
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"{path!r} is no file; `kvdoctor record MODEL -o FILE` writes golden numbers")
    try:
        arrays = unpack(file)
        head = from_text(arrays[HEAD]) if HEAD in arrays else None
        if not isinstance(head, dict) or head.get("schema") != SCHEMA:
            raise ValueError(f"it is not of the schema {SCHEMA}")  # noqa: TRY301 - said with the file's name below
        stacks = tuple(_read_stack(number, facts, arrays) for number, facts in enumerate(_get(head, "stacks", list)))
        model, runtime = (_get(head, name, str)[:80] for name in ("model", "onnxruntime"))
        if (seed := _get(head, "seed", int)) < 0:
            raise ValueError("the seed is negative")  # noqa: TRY301 - said with the file's name below
        return Golden(path, model, runtime, seed, stacks)
    except ValueError as error:
        anew = "`kvdoctor record` writes them anew"
        raise UsageError(f"{path!r} holds no golden numbers that can be read: {error}; {anew}") from None


def _read_stack(number: int, facts: Any, arrays: Mapping[str, Any]) -> GoldenStack:
    if not isinstance(facts, dict):
        raise ValueError("a stack is no table")  # noqa: TRY004 - a value of the file
    own = {name.partition("/")[2]: values for name, values in arrays.items() if name.startswith(f"{number}/")}
    exactness, vocabulary = _get(facts, "exactness", str), facts.get("vocabulary")
    if exactness not in TOLERANCES or not (vocabulary is None or type(vocabulary) is int):
        raise ValueError("the arithmetic or the vocabulary of a stack is none")
    name, kinds, weights = (_get(facts, key, str) for key in ("name", "kinds", "weights"))
    layers, states, draws = (_get(facts, key, int) for key in ("layers", "states", "draws"))
    walks = from_arrays(own)
    check_recorded(walks, vocabulary)
    return GoldenStack(name, vocabulary, kinds, layers, exactness, weights, states, draws, walks)


def _get(facts: Mapping[str, Any], name: str, kind: type) -> Any:
    if type(facts.get(name)) is not kind:
        raise ValueError(f"{name} is missing")
    return facts[name]


def render_golden(model: str, stacks: tuple[GoldenStack, ...], seed: int, onnxruntime: str) -> bytes:
    """The content of a file of golden numbers."""
    names = [field.name for field in fields(GoldenStack) if field.name != "walks"]
    facts = [{name: getattr(one, name) for name in names} for one in stacks]
    head = {"schema": SCHEMA, "kvdoctor": __version__, "onnxruntime": onnxruntime, "model": model, "seed": seed}
    arrays = {HEAD: to_text({**head, "stacks": facts})}
    for number, one in enumerate(stacks):
        arrays |= {f"{number}/{name}": values for name, values in to_arrays(one.walks).items()}
    return pack(arrays)


def digest_stack(
    stack: StackFiles, contract: CacheContract, folder: Path, options: Options, runtime: Runtime
) -> GoldenStack:
    """Decode with a stack, and keep the digests; raises `CannotCheck` where it cannot be decoded."""
    if unmet := next(find_unmet_preconditions(stack, contract), None):
        raise CannotCheck(unmet)
    side = PairedSide(stack.name, folder, contract)
    job = DigestJob(side, Path(), seed=options.seed, provider=options.provider)
    done, walks = _run(job, runtime)
    size, weights = measure_size(contract), describe_rounding(stack)
    sizes = (size.vocabulary, size.kinds, size.layers)
    return GoldenStack(stack.name, *sizes, contract.exactness, weights, done.states, done.draws, walks)


def compare_with_golden(
    context: ContractContext, golden: Golden, options: Options, runtime: Runtime
) -> GoldenComparison:
    """Decode with a stack along the golden tokens, and compare.

    Raises:
        CannotCheck: no stack of the golden numbers fits, or the decoding fails.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    contract, stack = context.contract, context.stack
    stored = _select_stack(context, golden)
    job = DigestJob(context.side, Path(), states=stored.states, seed=golden.seed, provider=options.provider)
    done, mine = _run(job, runtime, stored.walks)
    limits = (find_tolerance(name, options.tolerances) for name in (contract.exactness, stored.exactness))
    limit = max(limits, key=lambda one: one.passes)
    pairs = [(one, stored.walks[number]) for one, number in zip(mine, done.walks, strict=True)]
    difference = find_difference(pairs, (limit.passes, limit.fails))
    calls = sum(count_calls(one, other) for one, other in pairs)
    words = f"{calls} calls of {len(pairs)} decodings against {golden.words}"
    if len(pairs) < len(stored.walks):
        words += f", of the {len(stored.walks)} in it"
    if difference is not None and describe_rounding(stack) != stored.weights:
        correlation = round(sum(correlate(one, other) for one, other in pairs) / len(pairs), 4)
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
    same = [one for one in golden.stacks if _size_of(one) == size]
    if not same:
        others = "; ".join(_size_of(one).describe() for one in golden.stacks)
        raise CannotCheck(f"it is of another model: {others}; this one has {size.describe()}")
    stored = next((one for one in same if one.name == context.stack.name), same[0])
    if checksum_draws(golden.seed) != stored.draws:
        reason = "the installed numpy generates other random numbers than the one that recorded it; record it again"
        raise CannotCheck(reason)
    if contract.encoder_length not in (None, stored.states):
        raise CannotCheck(f"it was fed {stored.states} encoder states, and this model takes {contract.encoder_length}")
    return stored


def _size_of(stored: GoldenStack) -> ModelSize:
    return ModelSize(stored.vocabulary, stored.layers, stored.kinds)


def _run(
    job: DigestJob, runtime: Runtime, golden: tuple[GoldenWalk, ...] = ()
) -> tuple[Digested, tuple[GoldenWalk, ...]]:
    """Carry out a job in a private folder; with golden walks, along their tokens."""
    with scratch_folder() as scratch:
        job = replace(job, out=Path(scratch, "out.npz"))
        if golden:
            job = replace(job, golden=Path(scratch, "golden.npz"))
            Path(scratch, "golden.npz").write_bytes(pack(to_arrays(golden)))
        answers, failed = runtime.answer(job, Digested)
        failed = failed or (answers[0].failed if answers else "there was no answer")
        if failed:
            raise CannotCheck(failed)
        return answers[0], from_arrays(unpack(job.out))
