"""What an encoder is fed, and noise in place of what an encoder that is not here would give. numpy only."""

import numpy as np

from kvdoctor.calls import NUMPY_TYPES, Array, Scenario
from kvdoctor.contract import Axis, CacheContract, Graph, Port
from kvdoctor.filling import sized
from kvdoctor.words import plain_words


def encoder_feeds(contract: CacheContract, scenario: Scenario) -> dict[str, Array]:
    """Synthesise the inputs of the encoder graph: ids and features from the seed, masks of ones."""
    graph: Graph = contract.graph("encode")
    sizes: dict[Axis, int] = {"batch": scenario.batch, "encoder_input": scenario.encoder, "fixed": scenario.encoder}
    feeds = {}
    for port in graph.inputs:
        shape = sized(port, sizes)
        if port.role == "encoder_mask":
            feeds[port.name] = np.ones(shape, NUMPY_TYPES[port.dtype])
        elif port.role == "encoder_length":
            feeds[port.name] = np.full(shape, scenario.encoder, NUMPY_TYPES[port.dtype])
        else:
            feeds[port.name] = words_or_features(port, shape, contract, scenario)
    return feeds


def words_or_features(port: Port, shape: tuple[int, ...], contract: CacheContract, scenario: Scenario) -> Array:
    """What an encoder reads: ids of plain words where it takes integers, noise elsewhere."""
    rng, kind = np.random.default_rng(scenario.seed + 1), NUMPY_TYPES[port.dtype]
    if np.issubdtype(kind, np.integer):
        return rng.integers(*plain_words(contract), shape).astype(kind)
    return rng.standard_normal(shape).astype(kind)


def synthetic_encoder_states(contract: CacheContract, scenario: Scenario) -> Array | None:
    """Noise in place of encoder states, float[batch, encoder, hidden]; None where the decoder takes none."""
    ports = [port for graph in contract.graphs.values() for port in graph.inputs if port.role == "encoder_states"]
    if not ports:
        return None
    # One graph of a pair may know the width that the other leaves open.
    ports.sort(key=lambda port: not isinstance((port.shape or (None,))[-1], int))
    sizes: dict[Axis, int] = {"batch": scenario.batch, "encoder": scenario.encoder, "hidden": 16}
    rng = np.random.default_rng(scenario.seed + 1)
    return rng.standard_normal(sized(ports[0], sizes)).astype(NUMPY_TYPES[ports[0].dtype])


def synthetic_cross_caches(contract: CacheContract, scenario: Scenario) -> dict[str, Array]:
    """Noise in place of the caches that an encoder would make, by the name of its output."""
    rng = np.random.default_rng(scenario.seed + 2)
    sizes: dict[Axis, int] = {"batch": scenario.batch, "encoder": scenario.encoder}
    made = {}
    for slot in contract.slots:
        if slot.filled_in == "encode" and slot.filled_by is not None:
            shape = [d if isinstance(d, int) else sizes.get(a, 1) for d, a in zip(slot.shape, slot.axes, strict=True)]
            made[slot.filled_by] = rng.standard_normal(shape).astype(NUMPY_TYPES[slot.dtype])
    return made
