"""Decoders whose layers run inside one Scan or Loop over a stacked cache: ONNX text by form and fault."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper
from support.text_fixtures import compile_text

LAYERS = 3


@dataclass(frozen=True)
class LayerLoop:
    """How the layers are run, and what is wrong.

    `form` is scan, loop, sliced, counted, collected, buffer or sequence. `order` is where the cache has its layers: in
    front, behind the batch, or in front of an axis of keys and values. `reversed` are the directions of scan inputs and
    outputs: "", in, out or both. `started` says whether the condition of a Loop lets it begin.
    """

    form: str = "scan"
    order: str = "front"
    fault: str = ""
    reversed: str = ""
    opset: int = 17
    started: bool = True

    def model(self) -> onnx.ModelProto:
        """The decoder."""
        return compile_text(self.text())

    def text(self) -> str:
        """The decoder as ONNX text."""
        places, rows = ("new" if self.fault == one else "all" for one in ("positions", "mask"))
        pasts = [f"{self._cache('past')} past_{part}" for part in self._parts]
        presents = [f"{self._cache(self._total)} present_{part}" for part in self._parts]
        return f"""
< ir_version: 9, opset_import: ["" : {self.opset}] >
decoder (int64[batch, sequence] input_ids, {", ".join(pasts)})
=> (float[batch, sequence, 16] logits, {", ".join(presents)})
<
  float[16, 8] w_tokens, float[128, 8] w_positions, float[8, 16] w_logits,
  float[{LAYERS}, 8, 2, 4] w_q, float[{LAYERS}, 8, 2, 4] w_k, float[{LAYERS}, 8, 2, 4] w_v,
  float[{LAYERS}, 2, 4, 8] w_o,
  int64 zero = {{0}}, int64 one = {{1}}, int64[1] zeros = {{0}}, int64[1] ones = {{1}},
  int64 layers = {{{LAYERS}}}, bool go = {{{int(self.started)}}}, int64[2] heads_and_width = {{2, 4}},
  float shown = {{0}}, float hidden = {{-10000}}, float scale = {{0.5}}
>
{{
  past = Shape <start = {self._length_axis}, end = {self._length_axis + 1}> (past_{self._parts[0]})
  batch = Shape <start = 0, end = 1> (input_ids)
  new = Shape <start = 1, end = 2> (input_ids)
  total = Add (past, new)
  past_number = Squeeze (past)
  new_number = Squeeze (new)
  total_number = Squeeze (total)
  new_places = Range (zero, new_number, one)
  all_places = Range (past_number, total_number, one)
  places = Identity ({places}_places)
  rows = Identity ({rows}_places)
  columns = Range (zero, total_number, one)
  columns_wide = Unsqueeze (columns, zeros)
  rows_wide = Unsqueeze (rows, ones)
  seen = LessOrEqual (columns_wide, rows_wide)
  bias = Where (seen, shown, hidden)
  tokens = Gather (w_tokens, input_ids)
  placed = Gather (w_positions, places)
  x = Add (tokens, placed)
  {getattr(self, "_" + self.form)()}
  logits = MatMul (x_last, w_logits)
}}"""

    @property
    def _parts(self) -> list[str]:
        return ["kv"] if self.order == "parts" else ["k", "v"]

    @property
    def _total(self) -> str:
        return "past + sequence"

    @property
    def _length_axis(self) -> int:
        return 4 if self.order == "parts" else 3

    def _cache(self, length: str) -> str:
        sizes = {"front": f"{LAYERS}, batch", "behind": f"batch, {LAYERS}", "parts": f"{LAYERS}, 2, batch"}[self.order]
        return f'float[{sizes}, 2, "{length}", 4]'

    def _layer(self) -> str:
        """One layer: from x_in, the weights q_w to o_w and the pasts k_in and v_in to x_out, k_out and v_out."""
        apart = together = ""
        if self.order == "parts":
            apart = "k_in = Gather <axis = 0> (kv_in, zero) v_in = Gather <axis = 0> (kv_in, one)"
            together = (
                "k_part = Unsqueeze (k_out, zeros) v_part = Unsqueeze (v_out, zeros)"
                "kv_out = Concat <axis = 0> (k_part, v_part)"
            )
        made = {"new": "k_out = Identity (k_new)", "zeros": "k_out = Mul (k_all, shown)"}.get(
            self.fault, "k_out = Identity (k_all)"
        )
        return f"""
  {apart}
  q_new = Einsum <equation = "bsh,hnd->bnsd"> (x_in, q_w)
  k_new = Einsum <equation = "bsh,hnd->bnsd"> (x_in, k_w)
  v_new = Einsum <equation = "bsh,hnd->bnsd"> (x_in, v_w)
  k_all = Concat <axis = 2> (k_in, k_new)
  v_out = Concat <axis = 2> (v_in, v_new)
  {made}
  scores = Einsum <equation = "bnqd,bnkd->bnqk"> (q_new, k_all)
  scaled = Mul (scores, scale)
  masked = Add (scaled, bias)
  shares = Softmax <axis = -1> (masked)
  mixed = MatMul (shares, v_out)
  added = Einsum <equation = "bnqd,ndh->bqh"> (mixed, o_w)
  x_sum = Add (x_in, added)
  x_out = Tanh (x_sum)
  {together}"""

    def _scan(self) -> str:
        parts = self._parts
        weights = [f"float[{'2, 4, 8' if name == 'o' else '8, 2, 4'}] {name}_w" for name in "qkvo"]
        taken = [f"{self._one('past')} {part}_in" for part in parts]
        given = [f"{self._one(self._total)} {part}_out" for part in parts]
        at = 1 if self.order == "behind" else 0
        attributes = [f"num_scan_inputs = {4 + len(parts)}"]
        if at:
            attributes.append(f"scan_input_axes = [0, 0, 0, 0, {', '.join(['1'] * len(parts))}]")
            attributes.append("scan_output_axes = [1, -4]")
        if self.reversed in ("in", "both"):
            attributes.append(f"scan_input_directions = [{', '.join(['1'] * (4 + len(parts)))}]")
        if self.reversed in ("out", "both"):
            attributes.append(f"scan_output_directions = [{', '.join(['1'] * len(parts))}]")
        return f"""
  x_last, {", ".join("present_" + part for part in parts)} = Scan <{", ".join(attributes)}, body = layer (
    float[batch, sequence, 8] x_in, {", ".join(weights)}, {", ".join(taken)}
  ) => (float[batch, sequence, 8] x_out, {", ".join(given)}) {{ {self._layer()}
  }}> (x, w_q, w_k, w_v, w_o, {", ".join("past_" + part for part in parts)})"""

    def _one(self, length: str) -> str:
        length = "returned" if self.fault == "new" and length == self._total else length
        return f'float[{"2, " if self.order == "parts" else ""}batch, 2, "{length}", 4]'

    def _taken_by(self, index: str) -> str:
        """What a layer takes, by a scalar index."""
        taken = [f"{name}_w = Gather <axis = 0> (w_{name}, {index})" for name in "qkvo"]
        at = 1 if self.order == "behind" else 0
        taken += [f"{part}_in = Gather <axis = {at}> (past_{part}, {index})" for part in self._parts]
        return "\n  ".join(taken)

    def _loop(self) -> str:
        return self._looped(self._taken_by("i"))

    def _sliced(self) -> str:
        """Each layer takes a slice from its number to the next."""
        taken = ["i_from = Unsqueeze (i, zeros)", "i_to = Add (i_from, ones)"]
        for name, source in [*((f"{n}_w", f"w_{n}") for n in "qkvo"), *((f"{p}_in", f"past_{p}") for p in self._parts)]:
            taken += [
                f"{name}_slice = Slice ({source}, i_from, i_to, zeros)",
                f"{name} = Squeeze ({name}_slice, zeros)",
            ]
        return self._looped("\n  ".join(taken))

    def _looped(self, taken: str) -> str:
        parts, behind = self._parts, self.order == "behind"
        given = [f"{self._one(self._total)} {part}_out" for part in parts]
        returned = [f"stacked_{part}" if behind else f"present_{part}" for part in parts]
        turned = [f"present_{part} = Transpose <perm = [1, 0, 2, 3, 4]> (stacked_{part})" for part in parts if behind]
        return f"""
  x_last, {", ".join(returned)} = Loop <body = layer (
    int64 i, bool go_in, float[batch, sequence, 8] x_in
  ) => (bool go_out, float[batch, sequence, 8] x_out, {", ".join(given)}) {{ {taken} {self._layer()}
  go_out = Identity (go_in)
  }}> (layers, go, x)
  {" ".join(turned)}"""

    def _counted(self) -> str:
        """A loop that counts its layers itself, as one written with `while` does."""
        parts = self._parts
        given = [f"{self._one(self._total)} {part}_out" for part in parts]
        return f"""
  layers_run, x_last, {", ".join("present_" + part for part in parts)} = Loop <body = layer (
    int64 i, bool go_in, int64 n_in, float[batch, sequence, 8] x_in
  ) => (bool go_out, int64 n_out, float[batch, sequence, 8] x_out, {", ".join(given)}) {{
  {self._taken_by("n_in")} {self._layer()}
  n_out = Add (n_in, one)
  go_out = Less (n_out, layers)
  }}> ("", go, zero, x)"""

    def _collected(self) -> str:
        """A loop that carries the presents on, each layer behind the one before."""
        outputs = ", num_outputs = 2" if self.opset >= 18 else ""
        return f"""
  heads_of, width_of = Split <axis = 0{outputs}> (heads_and_width)
  none_shape = Concat <axis = 0> (zeros, batch, heads_of, total, width_of)
  none = ConstantOfShape (none_shape)
  x_last, present_k, present_v = Loop <body = layer (
    int64 i, bool go_in, float[batch, sequence, 8] x_in, float[n, batch, 2, t, 4] ks_in, float[n, batch, 2, t, 4] vs_in
  ) => (
    bool go_out, float[batch, sequence, 8] x_out, float[n2, batch, 2, t, 4] ks_out, float[n2, batch, 2, t, 4] vs_out
  ) {{ {self._taken_by("i")} {self._layer()}
  k_one = Unsqueeze (k_out, zeros)
  v_one = Unsqueeze (v_out, zeros)
  ks_out = Concat <axis = 0> (ks_in, k_one)
  vs_out = Concat <axis = 0> (vs_in, v_one)
  go_out = Identity (go_in)
  }}> (layers, go, x, none, none)"""

    def _sequence(self) -> str:
        """A loop that takes the layers from a sequence of tensors, and puts the presents into another one."""
        return f"""
  past_ks = SplitToSequence <axis = 0, keepdims = 0> (past_k)
  past_vs = SplitToSequence <axis = 0, keepdims = 0> (past_v)
  no_ks = SequenceEmpty ()
  no_vs = SequenceEmpty ()
  x_last, ks, vs = Loop <body = layer (
    int64 i, bool go_in, float[batch, sequence, 8] x_in,
    seq(float[batch, 2, t, 4]) ks_in, seq(float[batch, 2, t, 4]) vs_in
  ) => (
    bool go_out, float[batch, sequence, 8] x_out, seq(float[batch, 2, t, 4]) ks_out, seq(float[batch, 2, t, 4]) vs_out
  ) {{
  q_w = Gather <axis = 0> (w_q, i)
  k_w = Gather <axis = 0> (w_k, i)
  v_w = Gather <axis = 0> (w_v, i)
  o_w = Gather <axis = 0> (w_o, i)
  k_in = SequenceAt (past_ks, i)
  v_in = SequenceAt (past_vs, i)
  {self._layer()}
  ks_out = SequenceInsert (ks_in, k_out)
  vs_out = SequenceInsert (vs_in, v_out)
  go_out = Identity (go_in)
  }}> (layers, go, x, no_ks, no_vs)
  present_k = ConcatFromSequence <axis = 0, new_axis = 1> (ks)
  present_v = ConcatFromSequence <axis = 0, new_axis = 1> (vs)"""


def divide_cache(
    model: onnx.ModelProto, returned: Sequence[int] = range(LAYERS), split: bool = False, named: bool = True
) -> onnx.ModelProto:
    """The decoder with a key and a value for each layer, which the graph stacks in front of the loop.

    Layer n gets the entry `returned[n]` of what the loop returns, by Gather, or by one Split of all. Without names that
    tell what they are, inputs and outputs are numbered.
    """
    graph, before, behind = model.graph, list[onnx.NodeProto](), list[onnx.NodeProto]()
    for number in range(LAYERS):
        graph.initializer.append(numpy_helper.from_array(np.array(number), f"layer{number}"))
    inputs, outputs = list(graph.input[1:]), list(graph.output[1:])
    del graph.input[1:], graph.output[1:]
    for at, (past, present) in enumerate(zip(inputs, outputs, strict=True)):
        part = ("key", "value")[at]
        pasts = [f"past_key_values.{n}.{part}" if named else f"in_{n * 2 + at}" for n in range(LAYERS)]
        presents = [f"present.{n}.{part}" if named else f"out_{n * 2 + at}" for n in range(LAYERS)]
        stack = [f"{past.name} {n} in front" for n in range(LAYERS)]
        before += [helper.make_node("Unsqueeze", [pasts[n], "zeros"], [stack[n]]) for n in range(LAYERS)]
        before.append(helper.make_node("Concat", stack, [past.name], axis=0))
        taken = [f"{present.name} {n} in front" for n in range(LAYERS)]
        if split:
            behind.append(helper.make_node("Split", [present.name], taken, axis=0))
        for n, place in enumerate(returned):
            given = [taken[place], "zeros"] if split else [present.name, f"layer{place}"]
            behind.append(helper.make_node("Squeeze" if split else "Gather", given, [presents[n]]))
        for values, like, names in ((graph.input, past, pasts), (graph.output, present, presents)):
            sizes = [dim.dim_param or dim.dim_value for dim in like.type.tensor_type.shape.dim][1:]
            values.extend(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, sizes) for name in names)
    nodes = [*before, *graph.node, *behind]
    del graph.node[:]
    graph.node.extend(nodes)
    return model
