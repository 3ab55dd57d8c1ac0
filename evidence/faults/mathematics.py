"""Bodies that compute different things, chance, and numbers that are none."""

import numpy as np

from evidence.faults.anatomy import Body
from evidence.faults.base_models import ALL, LONE, SPELLED_OUT, SPLIT, TF5, Export
from evidence.faults.registry import fault
from evidence.faults.surgery import FLOAT, FLOAT16

TWO_BODIES = (*SPLIT, *TF5)


def scale_weight(body: Body, value: str, factor: float) -> None:
    """Multiply the weight behind a value, for this body and this use alone."""
    node, index = body.weight_behind(value)
    node.input[index] = body.constant((body.weight_of(node.input[index]) * factor).astype(np.float32))


def ban_tokens(export: Export, value: float = -np.inf) -> None:
    """Five tokens are banned."""
    for body in export.bodies:

        def masked(old: str, body: Body = body) -> str:
            words = body.op("Range", np.array(0), body.op("Squeeze", body.size(old, 2)), np.array(1))
            return body.op("Where", body.op("Less", words, np.array(5)), np.array(value, np.float32), old)

        body.replace("logits", masked)


def bypass(body: Body, made: str, instead: str) -> None:
    body.replace(made, lambda old: body.with_past(old, instead))


@fault("branches-disagree", "the values of layer 1 have weights 5 % larger in the steps", TWO_BODIES)
def other_value_weights(export: Export) -> None:
    body = export.later
    scale_weight(body, body.new_entries(body.self_slots()[3][0]), 1.05)


@fault("branches-disagree", "the same, and some tokens are banned with -1e9", TWO_BODIES)
def other_value_weights_behind_banned_tokens(export: Export) -> None:
    other_value_weights(export)
    ban_tokens(export, -1e9)


@fault("branches-disagree", "the keys of layer 0 have weights 5 % larger in the steps", TWO_BODIES)
def other_key_weights(export: Export) -> None:
    body = export.later
    scale_weight(body, body.new_entries(body.self_slots()[0][0]), 1.05)


@fault("branches-disagree", "the embeddings of the tokens are 5 % larger in the steps", TWO_BODIES)
def other_embeddings(export: Export) -> None:
    body = export.later
    body.replace(body.embedded(), lambda old: body.op("Mul", old, np.array(1.05, np.float32)))


@fault("branches-disagree", "the logits are made by weights 5 % larger in the steps", TWO_BODIES)
def other_head(export: Export) -> None:
    scale_weight(export.later, "logits", 1.05)


@fault("branches-disagree", "the attention over the encoder has other weights in the steps", (*SPLIT, "t5-tf5"))
def other_cross_queries(export: Export) -> None:
    body = export.later
    node = body.producer(body.scores(0, cross=True))
    scale_weight(body, node.output[0], 1.5)


@fault("branches-disagree", "the steps do not have a normalization", TWO_BODIES)
def norm_missing(export: Export) -> None:
    body = export.later
    norm = body.norms()[1]
    bypass(body, norm, body.before_norm(norm))


@fault("branches-disagree", "the steps do not have the last normalization", TWO_BODIES)
def last_norm_missing(export: Export) -> None:
    body = export.later
    norm = body.norms()[-1]
    bypass(body, norm, body.before_norm(norm))


@fault("branches-disagree", "the steps do not have a residual connection", TWO_BODIES)
def residual_missing(export: Export) -> None:
    body = export.later
    node = body.residuals()[0]
    projected = next(name for name in node.input if body.is_projected(name))
    bypass(body, node.output[0], projected)


@fault("branches-disagree", "the steps do not scale the scores of the attention", TWO_BODIES)
def scale_missing(export: Export) -> None:
    body = export.later
    for layer in body.layers():
        body.replace(body.unmasked(layer), lambda old: body.op("Mul", old, np.array(3.0, np.float32)))


@fault("branches-disagree", "the steps compute in 8 bits", TWO_BODIES)
def steps_rounded(export: Export) -> None:
    body = export.later
    for norm in body.norms():
        body.replace(
            norm,
            lambda old: body.op(
                "Div", body.op("Round", body.op("Mul", old, np.array(32, np.float32))), np.array(32, np.float32)
            ),
        )


@fault("new-entries-wrong", "once there is a past, the values of layer 1 are 5 % larger", LONE)
def other_values_with_a_past(export: Export) -> None:
    body = export.later
    past = body.self_slots()[3][0]
    node = body.producer(body.joined(past))
    node.input[1] = body.with_past(node.input[1], body.op("Mul", node.input[1], np.array(1.05, np.float32)))


@fault("branches-disagree", "once there is a past, a normalization is left out", LONE)
def norm_missing_with_a_past(export: Export) -> None:
    body = export.later
    norm = body.norms()[-1]
    bypass(body, norm, body.before_norm(norm))


@fault("nondeterministic", "noise is added to the embeddings", SPELLED_OUT)
def noise(export: Export) -> None:
    for body in export.bodies:
        body.replace(
            body.embedded(), lambda old, body=body: body.op("Add", old, body.op("RandomNormalLike", old, scale=0.02))
        )


@fault("nondeterministic", "noise is added to the embeddings once there is a past of more than 20 tokens", SPELLED_OUT)
def noise_when_long(export: Export) -> None:
    body = export.later

    def noisy(old: str) -> str:
        long = body.op("Greater", body.past_length(), np.array([20]))
        return body.op("Where", long, body.op("Add", old, body.op("RandomNormalLike", old, scale=0.5)), old)

    body.replace(body.embedded(), noisy)


@fault(
    "nondeterministic",
    "noise is added to the embeddings, and some tokens are banned with -inf",
    SPELLED_OUT,
)
def noise_behind_banned_tokens(export: Export) -> None:
    noise(export)
    ban_tokens(export)


@fault("nondeterministic", "noise is added to the embeddings of more than 20 new tokens", SPELLED_OUT)
def noise_in_long_prompts(export: Export) -> None:
    for body in export.bodies:

        def noisy(old: str, body: Body = body) -> str:
            long = body.op("Greater", body.new_length(), np.array([20]))
            return body.op("Where", long, body.op("Add", old, body.op("RandomNormalLike", old, scale=0.5)), old)

        body.replace(body.embedded(), noisy)


def drop(body: Body, value: str, training: str) -> str:
    return body.op("Dropout", value, np.array(0.2, np.float32), training)


@fault(
    "nondeterministic",
    "dropout was left on: onnxruntime takes it out when it optimizes, and leaves it where it does not",
    ALL,
    severity="warning",
)
def dropout(export: Export) -> None:
    for body in export.bodies:
        body.replace(body.embedded(), lambda old, body=body: drop(body, old, body.constant(np.array(True))))


@fault("nondeterministic", "dropout is on wherever there are new tokens", ALL)
def dropout_by_a_flag(export: Export) -> None:
    for body in export.bodies:

        def dropped(old: str, body: Body = body) -> str:
            some = body.op("Squeeze", body.op("Greater", body.new_length(), np.array([0])), np.array([0]))
            return drop(body, old, some)

        body.replace(body.embedded(), dropped)


@fault("nondeterministic", "dropout is on once there is a past", ALL)
def dropout_in_steps(export: Export) -> None:
    body = export.later
    body.replace(body.embedded(), lambda old: drop(body, old, body.op("Squeeze", body.has_past(), np.array([0]))))


@fault("non-finite", "the weights that make the logits are no numbers", SPELLED_OUT)
def weights_no_numbers(export: Export) -> None:
    for body in export.bodies:
        scale_weight(body, "logits", np.nan)


@fault("non-finite", "the logits are cast to float16 and are too large for it", ALL)
def logits_overflow(export: Export) -> None:
    for body in export.bodies:
        body.replace(
            "logits",
            lambda old, body=body: body.op(
                "Cast", body.op("Cast", body.op("Mul", old, np.array(1e5, np.float32)), to=FLOAT16), to=FLOAT
            ),
        )


UNGUARDED = ("marian", "t5", "marian-pair", "t5-pair", "opt", "bloom", "t5-tf5")
"""Those that pass NaN on; in the others a Where turns it into 0 behind the Softmax."""


@fault("non-finite", "beyond 20 tokens the embeddings overflow", ALL)
def overflow_when_long(export: Export) -> None:
    for body in export.bodies:

        def grown(old: str, body: Body = body) -> str:
            tokens = (
                body.new_length() if body.steps == "first" else body.op("Add", body.past_length(), body.new_length())
            )
            over = body.op("Max", body.op("Sub", tokens, np.array([20])), np.array([0]))
            return body.op(
                "Mul", old, body.op("Exp", body.op("Mul", body.op("Cast", over, to=FLOAT), np.array(90, np.float32)))
            )

        body.replace("logits", grown)


@fault("non-finite", "beyond 20 tokens a row of the mask is -inf throughout", UNGUARDED)
def mask_infinite_when_long(export: Export) -> None:
    body = export.later
    softmax = body.attentions()[0]
    left = body.op("Sub", np.array([20]), body.size(softmax.input[0], 3))
    room = body.op("Cast", body.op("Min", body.op("Max", left, np.array([0])), np.array([1])), to=FLOAT)
    softmax.input[0] = body.op("Add", softmax.input[0], body.op("Log", room))


@fault("non-finite", "once there is a past, 0 times infinity gets into the scores", UNGUARDED)
def infinity_times_zero(export: Export) -> None:
    body = export.later
    softmax = body.attentions()[1]
    none = body.op(
        "Mul",
        body.op("Cast", body.op("Sub", body.past_length(), body.past_length()), to=FLOAT),
        np.array(np.inf, np.float32),
    )
    softmax.input[0] = body.with_past(softmax.input[0], body.op("Add", softmax.input[0], none))
