"""A saved prefix: its file is read by another process, and what it holds decides the logits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.isolated import EXPORTS

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.decode.experiments.multi_turn import find_uncut
from kvdoctor.decode.experiments.prefix import SAVED
from kvdoctor.decode.messages import ExperimentJob
from kvdoctor.decode.runs import Outcome
from kvdoctor.options import Options
from kvdoctor.runtime.client import Runtime


def job(name: str, scratch: Path | None) -> ExperimentJob:
    folder = open_folder(str(EXPORTS / name))
    (stack,) = folder.stacks[:1]
    contract = read_contract(stack, folder.side_cars)
    return ExperimentJob(stack.name, folder.root.absolute(), contract, ("saved-prefix",), scratch=scratch)


def outcome(runtime: Runtime, wanted: ExperimentJob, experiment: str) -> tuple[Outcome, str | None]:
    (run,) = runtime.examine(replace(wanted, experiments=(experiment,))).runs
    return run.outcome, run.reason


@pytest.mark.parametrize("damage", [False, True])
def test_a_restored_prefix_is_the_one_in_the_file(damage: bool, tmp_path: Path) -> None:
    wanted = job("gpt2", tmp_path)
    with Runtime(Options().limits) as runtime:
        assert outcome(runtime, wanted, "saved-prefix")[0] == "passed"
        if damage:
            with np.load(tmp_path / SAVED) as kept:
                arrays = {name: kept[name] * (0.5 if name.startswith("past:") else 1) for name in kept.files}
            np.savez(
                tmp_path / SAVED, **{n: a.astype(a.dtype if n == "length" else np.float32) for n, a in arrays.items()}
            )
        assert outcome(runtime, wanted, "restored-prefix")[0] == ("differs" if damage else "passed")
        again = outcome(runtime, wanted, "restored-prefix")
    assert again == ("skipped", "no cache of a prefix was saved")


def test_it_is_restored_by_a_process_that_did_not_save_it(tmp_path: Path) -> None:
    wanted = replace(job("gpt2", tmp_path), experiments=("plain-loop", "saved-prefix", "restored-prefix"))
    with Runtime(Options().limits) as runtime:
        first = runtime._worker
        results = runtime.examine(wanted)
        assert runtime._worker is not first
    assert [(run.experiment, run.outcome) for run in results.runs] == [
        (name, "passed") for name in ("plain-loop", "saved-prefix", "restored-prefix")
    ]


def test_without_a_folder_nothing_is_saved() -> None:
    with Runtime(Options().limits) as runtime:
        found = outcome(runtime, job("gpt2", None), "saved-prefix")
    assert found == ("skipped", "there is no folder to save a cache in")


def test_slots_that_cannot_be_cut_are_grouped_by_the_reason() -> None:
    contract = job("gpt2", None).contract
    assert [*find_uncut(contract)] == []
    one, *rest = contract.slots
    mixed = replace(contract, slots=(replace(one, kind="conv-state"), replace(rest[0], growth="ring"), *rest[1:]))
    names = [obstacle.names for obstacle in find_uncut(mixed)]
    assert names == [(one.past,), (rest[0].past,)]
