"""What someone who knows transformers finds in the graph of a decoder: its attentions, norms, weights, positions."""

import numpy as np
import onnx
from onnx import numpy_helper

from evidence.faults.surgery import Opened, is_cross, ordered

PASSING = ("Identity", "Cast", "Transpose", "Reshape", "Unsqueeze")


class Body(Opened):
    """A body whose parts are known."""

    def attentions(self, cross: bool = False) -> list[onnx.NodeProto]:
        """The Softmax of each layer's attention over the tokens, or over the encoder states."""
        found = self.of_type("Softmax")
        if not any(is_cross(name) for name in (*self.pasts, *self.presents)):
            return [] if cross else found
        return found[1 if cross else 0 :: 2]

    def scores(self, layer: int, cross: bool = False) -> str:
        """What goes into a Softmax, float[batch, heads, new, total]."""
        return str(self.attentions(cross)[layer].input[0])

    def layers(self) -> range:
        return range(len(self.attentions()))

    def unmasked(self, layer: int) -> str:
        """The scores before a mask was added."""
        value = self.scores(layer)
        while (node := self.producer(value)) is not None and node.op_type != "MatMul":
            ahead = [name for name in node.input if self._comes_from_scores(name)]
            value = ahead[0] if ahead else node.input[0]
        return value

    def _comes_from_scores(self, value: str) -> bool:
        node = self.producer(value)
        while node is not None and node.op_type in ("Cast", "Mul", "Div", "Identity", "Reshape"):
            node = self.producer(node.input[0])
        return node is not None and node.op_type == "MatMul"

    def joined(self, past: str) -> str:
        """The past and the new entries behind each other."""
        front = [past]
        for value in front:
            for node in self.readers(value):
                if node.op_type == "Concat":
                    return str(node.output[0])
                if node.op_type in PASSING:
                    front.append(node.output[0])
        raise LookupError(past)

    def new_entries(self, past: str) -> str:
        """What is put behind the past."""
        node = self.producer(self.joined(past))
        assert node is not None
        return str(node.input[1])

    def weight_behind(self, value: str) -> tuple[onnx.NodeProto, int]:
        """The matrix multiplication that made a value, and which of its operands is the weight."""
        front = [value]
        for name in front:
            node = self.producer(name)
            if node is None:
                continue
            if node.op_type in ("MatMul", "Gemm"):
                for index, operand in enumerate(node.input[:2]):
                    if self.weight_of(operand) is not None:
                        return node, index
            front += [operand for operand in node.input if operand not in self.weights]
        raise LookupError(value)

    def weight_of(self, value: str) -> np.ndarray | None:
        """The numbers of a weight, also one that is turned or passed on."""
        if value in self.weights:
            return numpy_helper.to_array(self.weights[value])
        node = self.producer(value)
        if node is not None and node.op_type in ("Identity", "Transpose") and node.input[0] in self.weights:
            array = numpy_helper.to_array(self.weights[node.input[0]])
            return array if node.op_type == "Identity" else array.T
        return None

    def norms(self) -> list[str]:
        """The outputs of the layers that normalize, in order: LayerNormalization, or a last Mul by the weight."""
        return [str(node.output[0]) for node in ordered(self.graph) if self._normalizes(node)]

    def _normalizes(self, node: onnx.NodeProto) -> bool:
        if node.op_type == "Mul":
            return any(_is_norm(name) and self._flat(name) for name in node.input)
        return node.op_type in ("LayerNormalization", "SimplifiedLayerNormalization")

    def _flat(self, value: str) -> bool:
        weight = self.weight_of(value)
        return weight is not None and weight.ndim == 1

    def before_norm(self, value: str) -> str:
        """What the normalization of that output was given."""
        node = self.producer(value)
        assert node is not None
        if node.op_type != "Mul":
            return str(node.input[0])
        value = next(name for name in node.input if not self._flat(name))
        while (node := self.producer(value)) is not None and node.op_type in ("Cast", "Mul", "Div"):
            value = node.input[0]
        return value

    def residuals(self) -> list[onnx.NodeProto]:
        """The additions of a layer's output to what it was given: no operand is a weight, both have three axes."""
        found = []
        for node in self.of_type("Add"):
            weighty = [self.is_projected(name) for name in node.input]
            if any(weighty) and not any(self.weight_of(name) is not None for name in node.input):
                found.append(node)
        return found

    def is_projected(self, value: str) -> bool:
        """Whether a value comes out of a multiplication by a weight, with nothing but a bias behind it."""
        node = self.producer(value)
        while node is not None and (node.op_type in ("Reshape", "Add", "Identity")):
            if node.op_type == "Add" and not any(self.weight_of(name) is not None for name in node.input):
                return False
            inner = [name for name in node.input if self.weight_of(name) is None]
            node = self.producer(inner[0]) if inner else None
        return (
            node is not None
            and node.op_type in ("MatMul", "Gemm")
            and any(self.weight_of(name) is not None for name in node.input[:2])
        )

    def embedded(self) -> str:
        """The embeddings of the tokens, float[batch, new, hidden]."""
        for node in self.of_type("Gather"):
            if node.input[0] in self.weights and self._reaches(self.token_ids, node.input[1]):
                return str(node.output[0])
        raise LookupError("no embedding")

    def _reaches(self, start: str, value: str) -> bool:
        front = [value]
        for name in front:
            if name == start:
                return True
            node = self.producer(name)
            front += list(node.input[:1]) if node is not None else []
        return False

    def table_of_positions(self) -> onnx.NodeProto:
        """The Gather from a learned table of positions, or of distances."""
        words = ("position", "wpe", "relative_attention_bias")
        tables = [name for name in self.weights if any(word in name for word in words)]
        return next(node for node in self.of_type("Gather") if node.input[0] in tables)


def _is_norm(name: str) -> bool:
    return "norm" in name or "ln_" in name
