"""Other models that are compared token by token: the variants in a folder (`model.onnx`, `model_q4.onnx`).

They are graded by the most exact one. That gives facts, not findings: the user decides which difference is too large
(`diff --agree`). What runs them raises `KvdoctorError` where the worker cannot start ONNX Runtime.
"""

from collections.abc import Iterable, Iterator, Mapping

from kvdoctor.analysis.model_folder import ModelFolder
from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.contract import CacheContract
from kvdoctor.decode.messages import Graded, GradeJob, PairedSide
from kvdoctor.decode.tolerances import TOLERANCES
from kvdoctor.options import Options
from kvdoctor.report.facts import VariantFacts
from kvdoctor.runtime.client import Runtime


def grade_variants(
    folder: ModelFolder, contracts: Mapping[str, CacheContract], options: Options, runtime: Runtime
) -> Iterator[VariantFacts]:
    """The variants in a folder, each run with the base of its group."""
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
    external = {one.path: one.bytes or 0 for file in stack.members for one in file.external}
    inside = (file.skeleton.bytes_on_disk for file in stack.members if file.skeleton is not None)
    return sum(inside) + sum(external.values())
