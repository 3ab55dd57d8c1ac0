"""The sizes by which an earlier file of a model is recognized as one of the same model. Layouts may differ."""

from kvdoctor.contract import CacheContract
from kvdoctor.records import record


@record
class ModelSize:
    """What no export of a model changes: the tokens of its vocabulary, its layers, and the kinds of its caches."""

    vocabulary: int | None
    layers: int
    kinds: str

    def describe(self) -> str:
        """`96 tokens, 2 layers, self-attention`."""
        layers = f"{self.layers} layer{'' if self.layers == 1 else 's'}"
        return f"{self.vocabulary or 'an open number of'} tokens, {layers}, {self.kinds}"


def measure_size(contract: CacheContract) -> ModelSize:
    """Return the size of the model of a contract."""
    kinds = ", ".join(sorted({slot.kind for slot in contract.slots}))
    return ModelSize(contract.vocabulary, _count_layers(contract), kinds)


def list_kv_heads(contract: CacheContract) -> tuple[int, ...]:
    """Return the declared numbers of key-value heads, each once; empty where no axis of the caches counts them."""
    return tuple(sorted({heads for slot in contract.slots if (heads := slot.size("kv_heads")) is not None}))


def _count_layers(contract: CacheContract) -> int:
    """The layers with a cache; one tensor may hold those of all."""
    stacked = [slot.size("layers") or 1 for slot in contract.slots if "layers" in slot.axes]
    return max(stacked, default=0) + len({slot.layer for slot in contract.slots if "layers" not in slot.axes})
