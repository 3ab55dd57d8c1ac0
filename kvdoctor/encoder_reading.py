"""Reads the graph of an encoder: the parts of its inputs, and its outputs by the slots that they fill."""

from dataclasses import dataclass, replace
from typing import Any

from kvdoctor.configs import is_count
from kvdoctor.contract import Graph, Lack, Port, Slot
from kvdoctor.dialects import Dialect, RoleRule, inputs
from kvdoctor.graph import Declared
from kvdoctor.roles import Looks, plain_port, ruled, with_numbers
from kvdoctor.stacks import OnnxFile


@dataclass
class EncoderReader:
    """Reads encoders by the names of a dialect and by a config; what plays no known part is added to `missing`."""

    dialect: Dialect | None
    config: dict[str, Any]
    missing: list[Lack]

    @property
    def rules(self) -> tuple[RoleRule, ...]:
        """The names of its inputs, those of the dialect first."""
        return (*(self.dialect.encoder_inputs if self.dialect else ()), *inputs.ENCODER_INPUTS)

    def graph(self, file: OnnxFile, slots: tuple[Slot, ...]) -> Graph:
        """Its inputs by name, else by what is done with them; its outputs by what they fill."""
        view = file.graph
        ports = [with_numbers(ruled(port, self.rules) or self._input(port, file)) for port in view.inputs.values()]
        filled = {slot.filled_by for slot in slots if slot.filled_in == "encode"}
        outputs = [
            plain_port(p, "present")
            if p.name in filled
            else ruled(p, inputs.ENCODER_OUTPUTS) or plain_port(p, "auxiliary")
            for p in view.outputs.values()
        ]
        if not filled and not any(port.role == "encoder_states" for port in outputs):
            outputs = [
                replace(p, role="encoder_states", axes=("batch", "encoder", "hidden"))
                if len(p.shape or ()) == 3 and i == 0
                else p
                for i, p in enumerate(outputs)
            ]
        return Graph(file.name, tuple(self._image_sized(port) for port in ports), tuple(outputs))

    def _input(self, port: Declared, file: OnnxFile) -> Port:
        """An unnamed input of the encoder: words or features by its element type and rank."""
        rank, looks = len(port.shape or ()), None
        if file.dataflow is not None:
            looks = Looks(file.dataflow, file.graph.inputs)
        if rank == 2 and port.dtype in ("int64", "int32") and looks is not None:
            role = "encoder_input" if looks.token_ids([port.name]) else "encoder_mask"
            return Port(port.name, port.dtype, port.shape, role, ("batch", "encoder_input"))  # type: ignore[arg-type]
        if rank in (2, 3, 4) and port.dtype.startswith("float"):
            axes: Any = {
                2: ("batch", "encoder_input"),
                3: ("batch", "fixed", "encoder_input"),
                4: ("batch", *["fixed"] * 3),
            }
            return Port(port.name, port.dtype, port.shape, "encoder_input", axes[rank])
        self.missing.append(Lack(port.name, f"this input of {file.name} plays no known part"))
        return plain_port(port, "auxiliary")

    def _image_sized(self, port: Port) -> Port:
        """An image has the channels and the size that the config says; names of axes do not tell."""
        if len(port.axes) != 4 or port.shape is None or len(port.shape) != 4:
            return port
        part = self.config.get("encoder")
        part = part if isinstance(part, dict) else self.config
        channels, size = part.get("num_channels"), part.get("image_size")
        height, width = size if isinstance(size, list) and len(size) == 2 else (size, size)
        known = (None, channels if is_count(channels) else 3, *(n if is_count(n) else 224 for n in (height, width)))
        shape = tuple(d if isinstance(d, int) else k or d for d, k in zip(port.shape, known, strict=True))
        return replace(port, shape=shape)
