"""Experiments driven by scripted answers: no runtime, only what the loop feeds."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from support.isolated import EXPORTS
from support.text_fixtures import load_all

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Answer, Array, Call, Encoded, Scenario
from kvdoctor.decode.experiments import Experiment, load
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.inputs import plain_token_ids
from kvdoctor.decode.messages import ExperimentJob, FileOpening
from kvdoctor.decode.stack_driver import StackDriver
from kvdoctor.diagnose.inspection import inspect
from kvdoctor.runtime.client import Runtime
from kvdoctor.runtime.process import Limits


@pytest.mark.parametrize("size", [1, 2, 3, 4, 128])
def test_ids_are_in_the_vocabulary(size: int) -> None:
    contract = replace(builder("gpt2").contract, vocabulary=size)
    low, high = plain_token_ids(contract)
    assert 0 <= low < high <= size
    assert high - low >= size / 2


@dataclass
class Scripted:
    """A value that came back, filled with a number that says from which call; the driver notes that call as well."""

    content: Array
    made: tuple[int, bytes] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.content.shape)

    def array(self) -> Array:
        return self.content


def builder(name: str, **sizes: int) -> FeedBuilder:
    contract = inspect(str(EXPORTS / name)).stacks[0].contract
    assert contract is not None
    scenario = Scenario(**sizes)
    states = np.ones((scenario.batch, 7, 32), np.float32) if contract.has_encoder_states else None
    return FeedBuilder(contract, scenario, Encoded(states))


def answer(contract: CacheContract, call: Call, number: int) -> Answer:
    """What a healthy merged or single decoder returns: present = past + new, the cross cache emptied in decode."""
    batch = 1
    outputs: dict[str, Any] = {}
    for slot in contract.slots:
        heads, width = slot.size("kv_heads"), slot.size("head_dim")
        assert heads is not None
        assert width is not None
        length = call.past + call.new if slot.kind == "self-attention" else 7
        shape = (0, heads, 1, width) if slot.emptied and call.phase == "decode" else (batch, heads, length, width)
        if slot.present:
            outputs[slot.present] = Scripted(np.full(shape, number, np.float32))
    outputs["logits"] = Scripted(np.zeros((batch, call.new, 128), np.float32))
    return Answer(outputs, "logits", call.past, call.new)


def drive(experiment: Experiment, given: FeedBuilder) -> list[Call]:
    """All calls of an experiment, each answered by its number."""
    calls: list[Call] = []
    running = experiment.calls(given)
    try:
        call = next(running)
        while True:
            calls.append(call)
            call = running.send(answer(given.contract, call, len(calls)))
    except StopIteration:
        return calls


def named(name: str) -> Experiment:
    return next(experiment for experiment in load() if experiment.name == name)


def shape(call: Call, name: str) -> tuple[int, ...]:
    return tuple(call.feeds[name].shape)


def test_the_plain_loop_feeds_the_placeholder_back() -> None:
    steps = [call for call in drive(named("plain-loop"), builder("marian-4.57.6")) if call.kind == "step"]
    cross = [shape(call, "past_key_values.0.encoder.key") for call in steps]
    assert cross[:3] == [(1, 4, 0, 8), (1, 4, 7, 8), (0, 4, 1, 8)]
    assert [call.past for call in steps] == [0, 3, 4, 5, 6, 7, 8, 9]


def test_the_held_loop_keeps_the_value_of_the_prefill() -> None:
    steps = [call for call in drive(named("held-loop"), builder("marian-4.57.6")) if call.kind == "step"]
    held = [call.feeds["past_key_values.1.encoder.value"] for call in steps[1:]]
    assert all(value is held[0] for value in held)
    assert held[0].shape == (1, 4, 7, 8)
    fed_back = [np.asarray(call.feeds["past_key_values.1.decoder.value"].array()).max() for call in steps[2:]]
    assert fed_back == sorted(set(fed_back))


def test_feeds_are_coupled() -> None:
    for call in drive(named("plain-loop"), builder("llama-gqa")):
        assert shape(call, "attention_mask") == (1, call.past + call.new)
        assert list(np.asarray(call.feeds["position_ids"])[0]) == list(range(call.past, call.past + call.new))


def test_each_of_two_encoders_has_the_same_states_in_every_graph(tmp_path: Path) -> None:
    given = builder(str(load_all()["encoders-two-widths-healthy"].write(tmp_path)))
    contract, graph = given.contract, given.contract.graph("decode")
    graphs = {"first": graph, "other": replace(graph, inputs=graph.inputs[::-1]), **contract.graphs}
    for name in ("first", "other"):
        phases = {**contract.phases, "prefill": replace(contract.phases["prefill"], graph=name)}
        pair = replace(contract, graphs=graphs, phases=phases)
        feeds = replace(given, contract=pair, encoded=Encoded(np.arange(8.0).reshape(1, 1, 8))).prefill(3).feeds
        fed = [list(np.ravel(feeds[port])) for port in ("audio_states", "text_states")]
        assert fed == [list(range(8)), list(range(1, 7))]


def test_the_switch_follows_the_phase() -> None:
    for call in drive(named("held-loop"), builder("t5")):
        assert bool(np.asarray(call.feeds["use_cache_branch"])[0]) is (call.phase == "decode")


def test_a_loop_ends_with_its_controls() -> None:
    calls = drive(named("held-loop"), builder("whisper"))
    controls = [call for call in calls if call.kind == "control"]
    assert [call.label for call in controls] == ["self-attention cache zeroed", "cross-attention cache zeroed"]
    last = next(call for call in reversed(calls) if call.kind == "step")
    assert all(call.past == last.past for call in controls)
    assert not np.asarray(controls[0].feeds["past_key_values.0.decoder.key"]).any()
    assert controls[1].feeds["past_key_values.0.decoder.key"] is last.feeds["past_key_values.0.decoder.key"]


def test_every_step_is_held_against_its_own_positions() -> None:
    given = builder("gpt2")
    calls = drive(named("plain-loop"), given)
    for call in (one for one in calls if one.kind != "reference"):
        assert call.expected is not None
        assert call.expected.shape[1] == call.new


@pytest.mark.parametrize("name", ["gpt2", "marian-4.57.6"])
def test_same_seed_same_feeds(name: str) -> None:
    first, again = (drive(named("empty-past"), builder(name)) for _ in range(2))
    other = drive(named("empty-past"), builder(name, seed=1))
    assert all(
        np.array_equal(np.asarray(a.feeds["input_ids"]), b.feeds["input_ids"])
        for a, b in zip(first, again, strict=True)
    )
    assert not np.array_equal(np.asarray(first[0].feeds["input_ids"]), np.asarray(other[0].feeds["input_ids"]))


def test_no_cache_comes_first_in_the_late_cache_loop() -> None:
    steps = [call for call in drive(named("late-cache"), builder("marian-4.57.6")) if call.kind == "step"]
    assert [(call.phase, call.new) for call in steps[:5]] == [
        ("prefill", 3),
        ("prefill", 4),
        ("prefill", 5),
        ("prefill", 6),
        ("decode", 1),
    ]


def test_sizes_of_the_default_scenario_differ() -> None:
    scenario = Scenario()
    assert len({scenario.batch, scenario.prompt, scenario.encoder, scenario.total}) == 4


def test_every_experiment_says_what_it_asks() -> None:
    for experiment in load():
        assert experiment.question
        assert experiment.judged or experiment.why or experiment.explains, experiment.name


@dataclass
class Counting(StackDriver):
    """Answers calls with the number of the call, and counts those that were run."""

    ran: int = 0

    def run_session(self, call: Call) -> Answer:
        self.ran += 1
        return answer(self.contract, call, self.ran)


def counting() -> tuple[Counting, FeedBuilder]:
    loop = builder("gpt2", prompt=3, steps=4)
    return Counting("stack", loop.contract, None, 0, lambda _: None), loop


def test_an_equal_call_of_another_experiment_runs_once() -> None:
    """Also a step on what came back: the feeds of both are the outputs of equal calls."""
    driver, loop = counting()
    for _ in range(2):
        used: set[bytes] = set()
        first = driver.run_once(loop.prefill(3), used)
        driver.run_once(loop.decode(3, 4, loop.carry(None, first, "held")), used)
    assert driver.ran == 2
    driver.run_once(loop.prefill(4), set())
    assert driver.ran == 3


def test_what_an_experiment_repeats_is_run_again() -> None:
    """So do the runs that show whether a model answers twice in the same way, and those in another way."""
    driver, loop = counting()
    used: set[bytes] = set()
    driver.run_reference(loop.reference(), used)
    assert [driver.run_once(loop.prefill(loop.scenario.total), used) and driver.ran for _ in range(3)] == [2, 3, 4]
    driver.run_reference(loop.reference(), used := set())
    driver.run_once(loop.prefill(loop.scenario.total), used)
    assert driver.ran == 5
    for way in ("io-binding", "io-binding", "basic", "basic"):
        driver.run_once(replace(loop.prefill(3), via=way), set())
    assert driver.ran == 9


def test_nothing_is_reused_after_a_call_that_overwrites() -> None:
    driver, loop = counting()
    first = driver.run_once(loop.prefill(3), set())
    past = loop.carry(None, first, "held")
    driver.run_once(loop.decode(3, 4, past), set())
    driver.run_once(replace(loop.decode(3, 4, past), via="one-buffer"), set())
    assert driver.ran == 3
    for _ in range(2):  # the past is not what the first call returned any more
        driver.run_once(loop.decode(3, 4, past), set())
    driver.run_once(loop.prefill(3), set())
    assert driver.ran == 6


def test_answers_are_held_up_to_a_size() -> None:
    driver, loop = counting()
    for start in range(200):
        tokens = np.full_like(loop.tokens, start)
        driver.run_once(replace(loop, tokens=tokens).prefill(loop.scenario.total), set())
    held = [sum(v.array().size for v in one.outputs.values()) for one, _ in driver.known.answers.values()]
    assert (len(held), driver.known.numbers) == (200, sum(held))
    with patch("kvdoctor.decode.stack_driver.MOST_KEPT", sum(held) // 10):
        driver.run_once(loop.prefill(3), set())
        assert 10 < len(driver.known.answers) <= 21
        assert driver.known.numbers <= sum(held) // 10


def test_a_file_of_two_stacks_is_opened_once() -> None:
    folder = open_folder(str(EXPORTS / "marian-4.57.6"))
    opened = []
    with Runtime(Limits()) as runtime:
        for stack in folder.stacks:
            contract = read_contract(stack, folder.side_cars)
            for _ in range(2):
                loop = {"merged": "held-loop", "pair": "plain-loop"}[stack.name]
                job = ExperimentJob(stack.name, folder.root.absolute(), contract, (loop,))
                opened += [(event.file, event.level) for event in runtime.ask(job) if isinstance(event, FileOpening)]
    assert len(folder.stacks) == 2
    assert len(set(opened)) == len(opened) == 4
