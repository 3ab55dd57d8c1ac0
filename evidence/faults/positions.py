"""Tokens that are computed at the wrong place."""

import numpy as np

from evidence.faults.anatomy import Body
from evidence.faults.base_models import Export
from evidence.faults.registry import fault
from evidence.faults.surgery import Make

LEARNED = ("gpt2", "opt", "marian", "whisper", "marian-pair", "whisper-pair")
ROTARY = ("llama-gqa", "qwen2", "llama-tf5")
COUNTED = (*LEARNED, *ROTARY)
"""Those that number their tokens."""
DISTANT = ("t5", "t5-pair", "t5-tf5")
"""Those that look up what to add to the scores by the distance between tokens."""


def renumber(body: Body, make: Make) -> None:
    """Change the numbers of the new tokens, and nothing else that is read off the same value."""
    if "position_ids" in body.inputs:
        body.replace_inside("position_ids", make)
        return
    table = body.table_of_positions()
    table.input[1] = make(table.input[1])


def unrotated(body: Body, value: str) -> str:
    """What a rotation by Add(Mul(x, cos), Mul(turned x, sin)) was given."""
    return body.producer(body.producer(value).input[0]).input[0]


@fault("positions-not-offset", "new tokens are numbered from 0 again", COUNTED)
def positions_restart(export: Export) -> None:
    body = export.later
    renumber(body, lambda ids: body.op("Sub", ids, body.past_length()))


@fault("positions-not-offset", "new tokens are numbered one too low, as if the past were shorter", COUNTED)
def positions_lag_by_one(export: Export) -> None:
    body = export.later
    renumber(body, lambda ids: body.op("Sub", ids, body.op("Min", body.past_length(), np.array([1]))))


@fault("positions-not-offset", "new tokens are numbered one too high, as if the past were longer", COUNTED)
def positions_run_ahead(export: Export) -> None:
    body = export.later
    renumber(body, lambda ids: body.op("Add", ids, body.op("Min", body.past_length(), np.array([1]))))


@fault("positions-not-offset", "every step has the number 1, as the one that was traced", COUNTED)
def positions_stand_still(export: Export) -> None:
    body = export.later

    def second(ids: str) -> str:
        return body.op("Sub", ids, body.op("Max", body.op("Sub", body.past_length(), np.array([1])), np.array([0])))

    renumber(body, second)


@fault("positions-not-offset", "steps count no distance to the past", DISTANT)
def distances_lost(export: Export) -> None:
    body = export.later
    table = body.table_of_positions()
    table.input[1] = body.op("Mul", table.input[1], np.array(0))


@fault("positions-not-offset", "new keys are rotated from 0 again, queries are not", ROTARY)
def keys_rotated_anew(export: Export) -> None:
    body = export.later
    for past, _ in body.self_slots()[::2]:
        key = body.new_entries(past)
        body.producer(body.joined(past)).input[1] = body.with_past(key, unrotated(body, key))


@fault("branches-disagree", "new queries are rotated from 0 again, keys are not", ("llama-gqa", "qwen2", "llama-tf5"))
def queries_rotated_anew(export: Export) -> None:
    body = export.later
    for layer in body.layers():
        query = body.producer(body.unmasked(layer)).input[0]
        while body.producer(query).op_type != "Add":
            query = body.producer(query).input[0]
        body.replace(query, lambda made: body.with_past(made, unrotated(body, made)))
