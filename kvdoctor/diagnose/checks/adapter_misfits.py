"""An adapter file in the folder of the model does not fit the inputs of its graph.

What it means: the graph takes the matrices of a LoRA adapter as inputs, and ONNX Runtime fills them from an
`.onnx_adapter` file. A matrix of the file has no input, an input has no matrix, or one has another type, another width,
or another rank than its partner: running with that adapter fails.

How it is decided: names, element types and shapes of the file are compared with the declared inputs. The two matrices
of a pair (`lora_A`, `lora_B`) must have the same rank. The values are not read.

Reproduce: `kvdoctor inspect MODEL`.

Repair: make the adapter again for this graph (Olive's ExtractAdapters writes both), or remove the file.
"""

from collections.abc import Iterator

from kvdoctor.analysis.model_folder import AdapterFile, AdapterParameter, find_misfit
from kvdoctor.contract import Port
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.findings import Advice, Fault, check

MAKE_AGAIN = Advice("caller", "make the adapter again for this graph, or remove the file from the folder")


@check("KV114", "adapter-misfits", "contract")
def adapter_misfits(context: ContractContext) -> Iterator[Fault]:
    """Adapter files whose matrices are not those that the decoder takes, one finding for each file."""
    ports = (port for graph in context.contract.graphs.values() for port in graph.inputs)
    wanted = {port.name: port for port in ports if port.role == "adapter"}
    views = [file.view for file in context.stack.members if file.view is not None]
    defaults = {tensor.name for view in views for tensor in view.model.graph.initializer}
    for file in context.folder.side_cars.adapters if wanted else ():
        problems = dict(_list_problems(file, wanted, defaults))
        if problems:
            names = tuple(sorted(problems))
            more = f"; {len(names) - 1} more do not fit" if len(names) > 1 else ""
            declared = f"a matrix for each of the {len(wanted)} adapter inputs of {context.decode_file}"
            fault = Fault("error", (file.name, *names), "the adapter file does not fit the graph", MAKE_AGAIN)
            fault = fault.compare(declared, f"{names[0]}: {problems[names[0]]}{more}")
            yield fault.also(file=file.name, where=f"adapter {file.name}")


def _list_problems(file: AdapterFile, wanted: dict[str, Port], defaults: set[str]) -> Iterator[tuple[str, str]]:
    """The matrices that do not fit, and why; an input that has a value of its own takes one, and needs none."""
    if file.problem is not None:
        yield file.name, file.problem
        return
    given = {parameter.name: parameter for parameter in file.parameters}
    for name, parameter in given.items():
        port = wanted.get(name)
        partner = given.get(name.replace("lora_A", "lora_B")) if "lora_A" in name else None
        if port is None:
            if name not in defaults:
                yield name, "no input of the graph takes it"
        elif (misfit := find_misfit(parameter, port.dtype, port.shape)) is not None:
            yield name, misfit
        elif partner is not None and _ranks_differ(parameter, partner, port):
            yield name, f"its rank is {parameter.shape[-1]}, that of {partner.name} is {partner.shape[0]}"
    for name in wanted.keys() - given.keys():
        yield name, "the file has no matrix for this input"


def _ranks_differ(first: AdapterParameter, second: AdapterParameter, port: Port) -> bool:
    """Whether a pair differs in its rank: the last axis of the first matrix, where the input leaves it open."""
    is_rank = bool(port.shape) and not isinstance((port.shape or (0,))[-1], int)
    return is_rank and bool(first.shape and second.shape) and first.shape[-1] != second.shape[0]
