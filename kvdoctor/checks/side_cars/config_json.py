"""config.json of transformers and Optimum against the graph."""

from kvdoctor.case import Case
from kvdoctor.checks.side_cars import numbers
from kvdoctor.checks.side_cars.claims import Claim, claims
from kvdoctor.checks.side_cars.disagreement import Disagreement
from kvdoctor.configs import decoder_config
from kvdoctor.listing import STEM


def config_json(case: Case) -> list[Disagreement]:
    """What it promises of the decoder and the graph does not show."""
    config = case.folder.side_cars.config
    if not config or not meant_for(case):
        return []
    model_type = str(decoder_config(config).get("model_type"))
    return [found for claim in claims(config) for found in _held(case, claim, model_type)]


def meant_for(case: Case) -> bool:
    """Whether config.json can be meant for a stack: it makes tokens, and no decoder beside it was left unread."""
    if case.stack is None or case.contract is None or not case.contract.slots:
        return False
    decode, main = case.contract.graph("decode"), case.stack.main
    if not case.contract.takes_tokens or not (decode.port("logits") or decode.port("next_token")):
        return False
    read = {file.path for file in case.folder.files}
    return has_usual_name(case) or read >= set(main.path.parent.glob("*.onnx"))


def has_usual_name(case: Case) -> bool:
    """Whether the decoder is called as Optimum calls it, so that config.json beside it is its own."""
    return case.stack is not None and STEM.fullmatch(case.stack.main.path.stem) is not None


def _held(case: Case, claim: Claim, model_type: str) -> list[Disagreement]:
    if claim.what == "layers":
        return list(numbers.layers(case, claim, model_type))
    if claim.what == "vocabulary":
        return list(numbers.vocabulary(case, claim))
    if claim.what == "context":
        # Who exports a buffer of fixed size chose a shorter context, and the graph says so.
        fixed = case.contract is not None and case.contract.capacity is not None
        return [] if fixed else list(numbers.context(case, claim))
    return list(numbers.sizes(case, claim))
