"""The features of the table in words."""

from kvdoctor.targets.limits import INPUTS


def words_of(feature: str) -> str:
    """`Attention-23` as `Attention of opset 23`, `com.microsoft:GroupQueryAttention.softcap` as its attribute."""
    domain, _, name = feature.rpartition(":")
    if not domain:
        operator, _, since = name.rpartition("-")
        return f"{operator} of opset {since}"
    operator, _, attribute = name.partition(".")
    whole = operator if domain == "ai.onnx" else f"{domain} {operator}"
    if attribute.startswith(INPUTS):
        return f"{whole} with {attribute.removeprefix(INPUTS)} inputs"
    return f"attribute {attribute} of {whole}" if attribute else whole


def operator_of(feature: str) -> str:
    """The operator that a feature belongs to: of an attribute the operator, of an operator itself."""
    domain, separator, name = feature.rpartition(":")
    return f"{domain}{separator}{name.partition('.')[0]}"
