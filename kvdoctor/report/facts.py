"""What a report says of a model: its files, its graphs, its stacks, and the targets that were requested."""

from dataclasses import field
from typing import Any, Literal

from kvdoctor.analysis.memory import MemoryPlan
from kvdoctor.analysis.proof import Proof
from kvdoctor.choices import CPU
from kvdoctor.contract import CacheContract
from kvdoctor.decode.speed import SpeedPoint
from kvdoctor.records import record

Verdict = Literal["healthy", "unhealthy", "incomplete", "not-applicable", "nothing-found"]
UNDIAGNOSED: tuple[Verdict, ...] = ("incomplete", "not-applicable")
"""Verdicts with exit code 3: it could not be completed, or there is no decoder with a cache to diagnose."""


@record
class GraphFacts:
    """The contents of a graph, subgraphs and functions included.

    Attributes:
        nodes: the number of nodes.
        operators: the number of nodes by operator, with its domain where that is not the standard one.
        initializers: the number of initializers.
        initializer_bytes: their size in bytes, by their declared shapes.
    """

    nodes: int
    operators: dict[str, int]
    initializers: int
    initializer_bytes: int


@record
class FileFacts:
    """One file as it is on disk.

    Attributes:
        path: the path of the file, relative to the model's folder.
        role: what the file is for, such as decoder-merged or encoder.
        bytes: its size in bytes, without external data.
        sha256: its SHA-256 digest; null if it was not computed.
        ir_version: the version of the ONNX format; null if the file cannot be read.
        opsets: the version of each operator set, by its domain.
        producer: the tool that wrote the file, as the file says.
        external: the files that hold its weights.
        inputs: name, dtype and shape of each input.
        outputs: name, dtype and shape of each output.
        graph: the contents of its graph; null if it cannot be read.
        oldest_runtime: the oldest release of onnxruntime that opens it on the CPU, by a measured table; null if none.
        oldest_because: what the release before that one lacks; null if it is the oldest that was measured.
    """

    path: str
    role: str
    bytes: int
    sha256: str | None = None
    ir_version: int | None = None
    opsets: dict[str, int] = field(default_factory=dict)
    producer: str | None = None
    external: tuple[str, ...] = ()
    inputs: tuple[dict[str, Any], ...] = ()
    outputs: tuple[dict[str, Any], ...] = ()
    graph: GraphFacts | None = None
    oldest_runtime: str | None = None
    oldest_because: str | None = None


@record
class ModelFacts:
    """The model.

    Attributes:
        path: the path as the user gave it.
        files: its files.
    """

    path: str
    files: tuple[FileFacts, ...]


@record
class Ground:
    """What a verdict rests on: the runs that passed.

    Attributes:
        pasts: the shortest and the longest past, in tokens.
        chunks: the numbers of new tokens on top of a past.
        batch: the numbers of rows.
        tokens: the tokens of the longest sequence; of several stacks that of the stack with the shortest one.
        sides: the cache against none (consistent), the checkpoint (faithful), other runtimes (portable).
        proved: the lengths for which the graph alone decides; null where that was not tried.
    """

    pasts: tuple[int, int]
    chunks: tuple[int, ...]
    batch: tuple[int, ...]
    tokens: int
    sides: tuple[str, ...] = ("consistent",)
    proved: dict[str, Any] | None = None


@record
class StackFacts:
    """One stack: the files that decode together.

    Attributes:
        name: the name that findings and runs refer to.
        layout: the layout of the export, such as optimum-merged.
        files: the paths of its files.
        contract: its cache contract; null if none could be read.
        cache: the memory plan of its cache.
        proof: for which lengths the graph alone decides; null where that was not tried, and next to an error.
        logits_can_be_cut: whether `convert --logits last` knows its graphs; only of the command `inspect`.
    """

    name: str
    layout: str
    files: tuple[str, ...]
    contract: CacheContract | None
    cache: MemoryPlan | None = None
    proof: Proof | None = None
    logits_can_be_cut: bool = False


@record
class VariantFacts:
    """A variant of a model (`_q4`, `_fp16`), graded by the one with the most exact arithmetic, the base.

    Attributes:
        stack: the name of its stack.
        base: the name of the stack that it was compared with.
        bytes: the size of its files on disk, external weights included.
        base_bytes: the same of the base.
        tokens: the positions whose logits were compared: those of the tokens that the base decodes.
        divergence: the mean Kullback-Leibler divergence of the next-token distributions, in nats; null without figures.
        same_top1: the share of positions with the same likeliest token; null without figures.
        first_other: the first decoded token, from 1 on, in whose place the variant has another; null if none.
        layers: by layer, the difference of its cache after the prompt, as a fraction of its standard deviation.
        reason: why there are no figures; null if there are.
    """

    stack: str
    base: str
    bytes: int
    base_bytes: int
    tokens: int = 0
    divergence: float | None = None
    same_top1: float | None = None
    first_other: int | None = None
    layers: dict[str, float] = field(default_factory=dict)
    reason: str | None = None


@record
class SpeedFacts:
    """How fast a stack decodes on this machine (`kvdoctor speed`).

    Attributes:
        stack: the name of its stack.
        processor: the processor of the machine, and its cores.
        threads: the threads of the runtime.
        provider: the execution provider.
        points: the figures at each length of the past.
        steps: the equal steps that were run to see whether memory grows.
        grown_bytes: by how much the resident memory grew over them, the first ones left out.
        left_out: why lengths were not measured.
    """

    stack: str
    processor: str
    threads: int
    provider: str
    points: tuple[SpeedPoint, ...]
    steps: int
    grown_bytes: int
    left_out: tuple[str, ...] = ()


@record
class TargetFacts:
    """A target runtime, and its results for each stack that differ from those of the local runtime.

    Attributes:
        asked: the target as the user gave it.
        onnxruntime: the release of onnxruntime that it stands for.
        ir: the highest IR version that it supports; null if the release is too new to have been measured.
        opset: the highest opset that it supports; null if the release is too new to have been measured.
        refused: the files that it does not load, by stack.
        other_logits: the experiments whose logits differ from those of the local runtime, by stack.
        not_run: the reason why nothing was run on it, by stack.
        provider: the execution provider, with the driver where one was asked for.
        adapter: the device that the provider ran on.
        tolerance: how far logits may be off there, in their standard deviations, by stack.
        on_cpu: the operators that ran on the CPU all the same, by stack.
    """

    asked: str
    onnxruntime: str
    ir: int | None
    opset: int | None
    refused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    other_logits: dict[str, tuple[str, ...]] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    provider: str = CPU
    adapter: str = ""
    tolerance: dict[str, float] = field(default_factory=dict)
    on_cpu: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def place(self) -> tuple[str, str]:
        """The runtime and the provider of its runs."""
        return self.runtime, self.provider

    @property
    def runtime(self) -> str:
        """The name of the runtime in runs."""
        return f"onnxruntime=={self.onnxruntime}"
