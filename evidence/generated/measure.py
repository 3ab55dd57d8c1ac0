"""What kvdoctor says of the generated decoders: `python -m evidence.generated.measure [--match TEXT] [--healthy]`."""

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx

import kvdoctor
from kvdoctor.report.document import exit_code

from .designs import BASES
from .exports import build
from .faults import KINDS, applicable, truth
from .harmless import HARMLESS, changed, off
from .strikes import Fault

RIGHT = 1e-4
"""In standard deviations of the logits: a healthy decoder is off by less."""
SILENT = {
    "cross cache lost at past 14 only": "the walk over all lengths keeps the cross-attention cache of the prefill",
    "written in a ring of 23": "the first step on a full ring differs, as it does where an attention has no window",
    "positions stop at 30 everywhere": "in the ring of 24: no cache shows the entries of more positions",
    "batch of the tokens declared as 1": "a note: a graph for one sequence may be meant so",
    "present cut to 16": "keys and values share a tensor: more than 16 tokens fail without a cache too",
    "switch inverted": "exit code 3: without the usual names nothing tells which branch takes a past",
    "positions of row 0 in all rows": "in a batch without padding all rows have these positions; a mask of four axes "
    "is not fed padding",
}
"""Kinds of faults that a step-test does not find in some designs, with the reason."""
LOOP = 10
"""Tokens of the loop that a step-test runs first."""


@dataclass(frozen=True)
class Case:
    """One model: a base, and a kind of fault or a harmless change of it."""

    base: str
    kind: str
    healthy: bool

    @property
    def name(self) -> str:
        return f"{self.kind} | {self.base}"

    def write(self, folder: Path) -> None:
        """Write the files of the model into a folder."""
        design = BASES[self.base]
        if self.healthy:
            changed(self.kind, design, folder)
        else:
            for name, proto in build(design, KINDS[self.kind]).items():
                onnx.save(proto, folder / name)


@dataclass(frozen=True)
class Said:
    """What kvdoctor said of a case."""

    case: Case
    verdict: str
    code: int
    leading: str
    severity: str
    seconds: float

    @property
    def found(self) -> bool:
        """A finding that is more than a note."""
        return self.severity in ("error", "warning")

    @property
    def alarm(self) -> bool:
        """Whether a healthy model is called faulty, or is left unjudged."""
        return self.case.healthy and (self.found or self.verdict != "healthy")

    @property
    def acceptable(self) -> bool:
        """Whether an expert would accept the leading name: by the kind, or by where the fault strikes."""
        fault = KINDS[self.case.kind]
        return self.found and self.leading in (*fault.accept, *names_by_strike(fault))

    @property
    def exact(self) -> bool:
        """Whether the leading name says more than that the logits differ."""
        return self.acceptable and self.leading != "cached-differs"

    def __str__(self) -> str:
        finding = f"{self.severity} {self.leading}" if self.leading else "-"
        return f"{self.case.name} | {self.verdict} {self.code} | {finding} | {self.seconds:.1f} s"


def names_by_strike(fault: Fault) -> tuple[str, ...]:
    """The checks that say where a fault strikes: with several new tokens, at some lengths, in which half of a step."""
    strike = fault.strike
    if strike.branch != "prefill" and (strike.new_from > 1 or strike.across is not None or strike.token):
        return ("chunk-differs",)
    lengths = (strike.past_to, strike.past_every, strike.position)
    limited = strike.past_from > 1 or strike.new_from > 1 or any(length is not None for length in lengths)
    # The smallest walk that shows it goes further than the loop does.
    far = sum(fault.walk.chunks[:-1]) > LOOP
    return ("cache-misread", "new-entries-wrong", *(("wrong-at-lengths",) if limited or far else ()))


def faulty(bases: int = 0) -> list[Case]:
    """Each kind with each base that it fits, or with so many of them, other ones for each kind."""
    by_kind: dict[str, list[str]] = {}
    for base, kind in applicable():
        by_kind.setdefault(kind, []).append(base)
    found = []
    for number, (kind, names) in enumerate(by_kind.items()):
        count = min(bases or len(names), len(names))
        step = len(names) / count
        chosen = sorted({(int(i * step) + number) % len(names) for i in range(count)})
        found += [Case(names[i], kind, healthy=False) for i in chosen]
    return found


def healthy(bases: int = 0) -> list[Case]:
    """Each harmless change of each base, or of so many of them."""
    found = []
    for number, (kind, fits) in enumerate(HARMLESS.items()):
        names = [name for name, design in BASES.items() if fits(design)]
        names = names[number % len(names) :] + names[: number % len(names)]
        found += [Case(name, kind, healthy=True) for name in names[: bases or None]]
    return found


def diagnose(case: Case, thorough: bool = False) -> Said:
    """Write a model to a temporary folder and run the step-test."""
    with tempfile.TemporaryDirectory() as folder:
        case.write(Path(folder))
        begin = time.monotonic()
        report = kvdoctor.step_test(folder, thorough=thorough)
        seconds = time.monotonic() - begin
    leading = report.findings[0] if report.findings else None
    name, severity = (leading.name, leading.severity) if leading else ("", "")
    return Said(case, report.verdict, exit_code(report, "error"), name, severity, seconds)


def measure(cases: list[Case], record: Path | None = None, thorough: bool = False) -> Iterator[Said]:
    """Diagnose each case, one after the other."""
    for case in cases:
        said = diagnose(case, thorough)
        if record is not None:
            with record.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(said)) + "\n")
        yield said


def prove(cases: list[Case]) -> Iterator[str]:
    """The cases that are not what they claim to be: a healthy one that is wrong, a fault that shows nowhere."""
    for case in cases:
        try:
            if case.healthy:
                found = off(case.kind, BASES[case.base])
                assert found < RIGHT, f"{case.name} is off by {found:.1e}"
            else:
                truth(case.base, case.kind)
        except AssertionError as wrong:
            yield str(wrong)


def summary(all_said: list[Said]) -> str:
    """Counts, and the lists of silent faults, of names that an expert would not accept, and of false alarms."""
    wrong = [said for said in all_said if not said.case.healthy]
    right = [said for said in all_said if said.case.healthy]
    found = [said for said in wrong if said.found]
    open_ones = [said for said in wrong if not said.found and said.verdict == "incomplete"]
    silent = [said for said in wrong if not said.found and said.verdict != "incomplete"]
    unaccepted = [said for said in found if not said.acceptable]
    alarms = [said for said in right if said.alarm]
    lines = []
    for title, listed in (
        ("silent", silent),
        ("not completely checked", open_ones),
        ("leading name", unaccepted),
        ("alarms", alarms),
    ):
        lines += [f"{title}: {said}" for said in listed]
    by_kind = Counter(said.case.kind for said in silent)
    lines += [f"silent in {count} bases: {kind}" for kind, count in by_kind.most_common()]
    kinds = len({said.case.kind for said in wrong})
    seconds = sum(said.seconds for said in all_said)
    return "\n".join(
        [
            *lines,
            f"faulty: {len(wrong)} models of {kinds} kinds; found {len(found)}, "
            f"with an error {sum(said.severity == 'error' for said in found)}, silent {len(silent)}, "
            f"not completely checked {len(open_ones)}; leading name acceptable {len(found) - len(unaccepted)}, "
            f"more than cached-differs {sum(said.exact for said in found)}",
            f"healthy: {len(right)} models; false alarms {len(alarms)}",
            f"{seconds:.0f} s",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--healthy", action="store_true", help="the healthy models alone")
    parser.add_argument("--faulty", action="store_true", help="the faulty models alone")
    parser.add_argument("--bases", type=int, default=4, help="bases for each kind of fault; 0: all that fit")
    parser.add_argument("--every", type=int, default=1, help="every n-th case alone")
    parser.add_argument("--record", type=Path, help="also append each line to this file, as JSON")
    parser.add_argument("--thorough", action="store_true", help="the step-test with --thorough")
    parser.add_argument("--truth", action="store_true", help="prove the cases by hand, without kvdoctor")
    given = parser.parse_args()
    cases = ([] if given.healthy else faulty(given.bases)) + ([] if given.faulty else healthy())
    cases = [case for case in cases if given.match in case.name][:: given.every]
    if given.truth:
        print("\n".join([*prove(cases), f"{len(cases)} cases"]))
        return
    done = []
    for said in measure(cases, given.record, given.thorough):
        print(said, flush=True)
        done.append(said)
    print(summary(done))


if __name__ == "__main__":
    main()
