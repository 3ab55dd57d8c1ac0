"""The proof of a layout for onnxruntime-genai: it generates the tokens of kvdoctor's own loop.

The runtime is run in a Python of its own (runtime/environments.py). An encoder is fed the same features in both. The
prompts have several lengths. Where two tokens are equally likely but for rounding, either may follow, so that no token
after that is compared.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdoctor.addons.conversions.layouts.genai import NAME
from kvdoctor.contract import CacheContract
from kvdoctor.decode.experiments.compared_elsewhere import PROMPTS, UNDECIDED
from kvdoctor.decode.messages import ExperimentJob
from kvdoctor.decode.parity import compare, describe_gap, judge
from kvdoctor.decode.tolerances import find_tolerance
from kvdoctor.records import record
from kvdoctor.repair.export.run_exporter import SCRIPTS
from kvdoctor.repair.session import RepairSession
from kvdoctor.report.repair_record import Proof
from kvdoctor.runtime.environments import GENAI, EnvironmentUnavailable, Requirements, ScriptFailed, ScriptProcess

if TYPE_CHECKING:
    import numpy as np


SCRIPT = SCRIPTS / "generate_with_genai.py"
NEEDS = Requirements(GENAI, ("onnxruntime_genai", "onnxruntime"), "genai")
LEAST = 8
"""Tokens to compare for each prompt, unless its text ends before."""
SEEDS = 4
"""Prompts of each length that are tried until so many tokens can be compared."""


@record(slots=False)
class Generated:
    """What the loop of kvdoctor generates from a prompt: the tokens to compare, and the logits of each.

    `ends` are the tokens that end a text; `fits` is how many tokens the context has room for; `features` is what the
    encoder was fed.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: "np.ndarray[Any, Any]"
    ends: tuple[int, ...]
    fits: int
    features: "np.ndarray[Any, Any] | None" = None

    @property
    def ended(self) -> bool:
        """Whether the last of them ends the text."""
        return bool(self.tokens) and self.tokens[-1] in self.ends

    @property
    def is_enough(self) -> bool:
        """Whether as many tokens can be compared as the proof needs."""
        return len(self.tokens) >= min(LEAST, self.fits)


@record
class Source:
    """The loop that is compared with: a stack in a folder, and its contract; `words` names it."""

    stack: str
    folder: Path
    contract: CacheContract
    words: str


def prove_generation(session: RepairSession, stack: str, source: Source) -> Iterator[Proof]:
    """The claims that onnxruntime-genai generates from the copy the tokens and the logits of the source."""
    claim = f"onnxruntime-genai generates the tokens of kvdoctor's own loop of {source.words}"
    config = json.loads((session.at / NAME).read_text(encoding="utf-8"))["model"]
    wanted = list(_generate(session, source, config))
    short = next((one for one in wanted if not (one.is_enough or one.ended)), None)
    if not wanted or short is not None:
        reason = "its loop did not run from any prompt"
        if short is not None:
            reason = f"prompts of {len(short.prompt)}: step {len(short.tokens)} has two tokens that are equally likely"
        yield Proof(stack, claim, False, f"no {LEAST} tokens to compare: {reason}")
        return
    try:
        generated, logits, versions = _ask(session, wanted, config)
    except EnvironmentUnavailable as error:
        yield Proof(stack, claim, False, f"could not be proved, onnxruntime-genai is not available: {error}")
        return
    except ScriptFailed as error:
        text = str(error).replace(str(session.at), "OUT")
        yield Proof(stack, claim, False, f"onnxruntime-genai does not run the copy: {text}")
        return
    different = next(filter(None, map(_find_difference, wanted, generated)), "")
    lengths = ", ".join(str(len(one.prompt)) for one in wanted)
    count = sum(len(one.tokens) for one in wanted)
    shown = different or f"{count} tokens from prompts of {lengths}"
    yield Proof(stack, claim, not different, f"{shown} ({versions})")
    if not different:
        yield _compare_logits(session, stack, source, wanted, logits)


def _generate(session: RepairSession, source: Source, config: dict[str, Any]) -> Iterator[Generated]:
    """The texts of kvdoctor's own loop: for each length of the prompt the first that is long enough, or the longest."""
    found: dict[str, list[Generated]] = {name: [] for name in PROMPTS}
    for seed in range(SEEDS):
        left = tuple(name for name, mine in found.items() if not any(one.is_enough for one in mine))
        if not left:
            break
        kept = session.scratch / f"generated-{seed}.npz"
        job = ExperimentJob(
            stack=source.stack,
            folder=source.folder.absolute(),
            contract=source.contract,
            experiments=left,
            seed=session.options.seed + seed,
            provider=session.options.provider,
            keep_logits=kept,
            timed=False,
            tolerances=dict(session.options.tolerances),
        )
        session.runtime.examine(job)
        for name, one in _read(kept, left, config):
            found[name].append(one)
    for mine in found.values():
        if mine:
            yield max(mine, key=lambda one: (one.is_enough, one.ended, len(one.tokens)))


def _read(file: Path, names: tuple[str, ...], config: dict[str, Any]) -> Iterator[tuple[str, Generated]]:
    import numpy as np

    end, padding = config["eos_token_id"], config["pad_token_id"]
    ends = end if isinstance(end, list) else [end]
    if not file.is_file():
        return
    with np.load(file) as kept:
        for name in names:
            if f"{name}:prompt" not in kept.files:
                continue
            prompt = tuple(map(int, kept[f"{name}:prompt"]))
            tokens = tuple(map(int, kept[f"{name}:decided"]))
            if not {padding, *ends}.isdisjoint(prompt):
                continue  # these have a meaning of their own in a prompt
            room = len(tokens)
            stop = next((at + 1 for at, token in enumerate(tokens) if token in ends), room)
            tokens = tokens[:stop]
            if UNDECIDED in tokens:
                tokens = tokens[: tokens.index(UNDECIDED)]
            logits = kept[f"{name}:logits"][: len(tokens)]
            features = kept[f"{name}:features"] if f"{name}:features" in kept.files else None
            yield name, Generated(prompt, tokens, logits, tuple(ends), room, features)


def _ask(session: RepairSession, wanted: list[Generated], config: dict[str, Any]) -> tuple[list[list[int]], Path, str]:
    """Let onnxruntime-genai generate from the prompts, and from the features that the source was fed.

    Gives the tokens for each prompt, the file of their logits, and the versions.

    Raises:
        EnvironmentUnavailable: there is no Python that has it.
        ScriptFailed: it refuses the copy, fails, or crashes.
    """
    out = session.scratch / "genai-logits.npz"
    asked = {
        "model": str(session.at.absolute()),
        "prompts": [one.prompt for one in wanted],
        "counts": [len(one.tokens) for one in wanted],
        "out": str(out),
    }
    given = {str(number): one.features for number, one in enumerate(wanted) if one.features is not None}
    if given:
        import numpy as np

        features = session.scratch / "genai-features.npz"
        np.savez(features, **given)  # type: ignore[arg-type, unused-ignore]
        asked |= {"features": str(features), "features_as": config["encoder"]["inputs"]["audio_features"]}
    script = ScriptProcess(SCRIPT, asked, NEEDS, session.options.offline)
    try:
        answer = script.ask()
    finally:
        script.stop()
    versions = ", ".join(f"{name} {script.hello[name]}" for name in ("onnxruntime-genai", "onnxruntime"))
    return answer["tokens"], out, versions


def _find_difference(wanted: Generated, got: list[int]) -> str:
    for step, token in enumerate(wanted.tokens):
        if step >= len(got):
            return f"prompt of {len(wanted.prompt)}: it ends after {step} tokens, and token {token} follows"
        if got[step] != token:
            return f"prompt of {len(wanted.prompt)}, step {step}: it generates token {got[step]} in place of {token}"
    return ""


def _compare_logits(session: RepairSession, stack: str, source: Source, wanted: list[Generated], file: Path) -> Proof:
    """Compare the logits of all steps: equal tokens alone may be chance."""
    import numpy as np

    claim = f"its logits are those of kvdoctor's own loop of {source.words}"
    limit = find_tolerance(source.contract.exactness, session.options.tolerances)
    worst = 0.0
    with np.load(file) as kept:
        for number, one in enumerate(wanted):
            got = kept[f"logits.{number}"]
            if got.shape != one.logits.shape:
                return Proof(stack, claim, False, f"their shape is {list(got.shape)}, not {list(one.logits.shape)}")
            found = compare(got[None], one.logits[None].astype(np.float32), limit)
            if judge(found, limit) != "pass":
                return Proof(stack, claim, False, f"prompt of {len(one.prompt)}: {describe_gap(found)}")
            worst = max(worst, found.relative)
    return Proof(stack, claim, True, f"within {worst:.1e} standard deviations" if worst else "bit for bit")
