"""What stands in the way of driving a stack, read off its contract."""

from collections.abc import Iterator

from kvdoctor.contract import CacheContract, Lack


def lacks(contract: CacheContract) -> Iterator[Lack]:
    """Say what the roles of ports and the sizes of slots leave open.

    A past axis may be anything but the widths of a slot must be numbers, since placeholders are made of them.
    """
    decode = contract.graph("decode")
    if not contract.slots:
        yield Lack(decode.file, "no past input is named as a known exporter names it, and none is found by dataflow")
    if not any(decode.port(role) for role in ("token_ids", "token_and_position", "embeddings")):
        yield Lack(decode.file, "there is no token_ids")
    if decode.port("token_ids") and decode.port("embeddings"):
        yield Lack(decode.file, "there are both token_ids and embeddings, and nothing says which to feed")
    if not decode.port("logits") and not decode.port("next_token"):
        yield Lack(decode.file, "there is no logits")
    for role in ("token_ids", "logits"):
        rivals = [port.name for port in (*decode.inputs, *decode.outputs) if port.role == role]
        if len(rivals) > 1:
            yield Lack(rivals[1], f"{' and '.join(rivals[:3])} look like {role}, and nothing says which it is")
    for slot in contract.slots:
        open_sizes = {a for d, a in zip(slot.shape, slot.axes, strict=True) if not isinstance(d, int)}
        if unknown := {"kv_heads", "head_dim", "channels", "state", "layers"} & open_sizes:
            yield Lack(slot.past, f"its {' and '.join(sorted(unknown))} is no number")
        if "batch_heads" in slot.axes and not contract.heads:
            yield Lack(slot.past, "an axis counts batch times heads, and no config says how many heads")
