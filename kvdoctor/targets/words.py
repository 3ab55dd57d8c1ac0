"""The features of the table in words."""


def words_of(feature: str) -> str:
    """`Attention-23` as `Attention of opset 23`, `com.microsoft:GroupQueryAttention.softcap` as its attribute."""
    domain, _, name = feature.rpartition(":")
    if not domain:
        operator, _, since = name.rpartition("-")
        return f"{operator} of opset {since}"
    operator, _, attribute = name.partition(".")
    whole = operator if domain == "ai.onnx" else f"{domain} {operator}"
    return f"attribute {attribute} of {whole}" if attribute else whole
