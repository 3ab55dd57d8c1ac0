"""config.json of transformers and Optimum against the graph."""

from kvdoctor.analysis.configs import decoder_config
from kvdoctor.diagnose.checks.side_cars import compare_numbers
from kvdoctor.diagnose.checks.side_cars.claims import ConfigClaim, claims
from kvdoctor.diagnose.checks.side_cars.disagreement import Disagreement
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.model.files import STEM


def config_json(context: ContractContext) -> list[Disagreement]:
    """The entries of config.json that disagree with the graph of a decoder."""
    config = context.folder.side_cars.config
    if not config or not meant_for(context):
        return []
    model_type = str(decoder_config(config).get("model_type"))
    return [found for claim in claims(config) for found in _compare_claim(context, claim, model_type)]


def meant_for(context: ContractContext) -> bool:
    """Whether config.json can describe a stack: it generates tokens, and no decoder beside it was left unread."""
    if not context.contract.slots:
        return False
    decode, main = context.contract.graph("decode"), context.stack.main
    if not context.contract.takes_tokens or not (decode.port("logits") or decode.port("next_token")):
        return False
    read = {file.path for file in context.folder.files}
    return has_usual_name(context) or read >= set(main.path.parent.glob("*.onnx"))


def has_usual_name(context: ContractContext) -> bool:
    """Whether the decoder has the file name of Optimum, so that config.json beside it describes it."""
    return STEM.fullmatch(context.stack.main.path.stem) is not None


def _compare_claim(context: ContractContext, claim: ConfigClaim, model_type: str) -> list[Disagreement]:
    if claim.what == "layers":
        return list(compare_numbers.layers(context, claim, model_type))
    if claim.what == "vocabulary":
        return list(compare_numbers.vocabulary(context, claim))
    if claim.what == "context":
        # An export with a buffer of fixed size has a shorter context on purpose.
        fixed = context.contract.capacity is not None
        return [] if fixed else list(compare_numbers.context(context, claim))
    return list(compare_numbers.sizes(context, claim))
