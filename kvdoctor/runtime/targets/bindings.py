"""Bindings of other languages: which onnxruntime each of their releases ships, and what it cannot do. Data.

Only what a source says stands here. A binding that loads whatever library it finds (onnxruntime_go, C, C++) ships
none: name the runtime itself.
"""

from dataclasses import field
from typing import Literal

from kvdoctor.records import record

Kind = Literal["reads-empty", "makes-empty"]
"""What a release of a binding cannot do with a tensor without elements: read one that comes out, make one to feed."""


@record
class Hazard:
    """A fault of a binding: what happens, and the first release without it."""

    kind: Kind
    words: str
    fixed_in: str


@record(slots=False)
class Binding:
    """A binding by the name that people use for it, and other spellings.

    `ships` maps releases, from old to new, to the onnxruntime inside. One that `follows_runtime` has the numbers of the
    runtime. `source` says where the numbers are from. `hazards` are faults with the releases that have them.
    """

    name: str
    source: str
    also: tuple[str, ...] = ()
    ships: dict[str, str] = field(default_factory=dict)
    hazards: tuple[tuple[Hazard, tuple[str, ...]], ...] = ()

    @property
    def follows_runtime(self) -> bool:
        """Whether its releases are numbered as those of the runtime."""
        return not self.ships


ORT_CRATE = {
    # The crates of the 1.x line bear the numbers of the runtime's line; the build script of the 1.15 one names 1.15.1.
    # Where the patches of the two differ the limits do not.
    **dict.fromkeys(("1.15.0", "1.15.1", "1.15.2", "1.15.3"), "1.15.1"),
    **dict.fromkeys(("1.16.0", "1.16.1", "1.16.2", "1.16.3"), "1.16.3"),
    "2.0.0-rc.0": "1.17.0",  # elixir-nx/ortex pull 25
    "2.0.0-rc.2": "1.17.3",  # release notes
    "2.0.0-rc.8": "1.19.2",  # ort-sys-2.0.0-rc.8/dist.txt
    "2.0.0-rc.9": "1.20.0",  # the archive that its build script fetches
    "2.0.0-rc.10": "1.22.0",  # pykeio/ort pull 393
    "2.0.0-rc.11": "1.23.2",  # description of the crate, badge of its README
    "2.0.0-rc.12": "1.24.2",  # description of the crate: 1.24
    "2.0.0-rc.13": "1.28.0",  # description of the crate, badge of its README
    "2.0.0-rc.14": "1.31.0",  # the same
    "2.0.0-rc.15": "1.31.0",  # the archives that ort-sys fetches
}
_CRATES = tuple(ORT_CRATE)
_BEFORE_RC10 = _CRATES[: _CRATES.index("2.0.0-rc.10")]
_UP_TO_RC12 = _CRATES[: _CRATES.index("2.0.0-rc.13")]


def _read_ships(pairs: str) -> dict[str, str]:
    """Releases of a binding, each with the runtime inside: `0.1.5=1.15.0 0.1.6=1.16.0`."""
    return {release: runtime for release, _, runtime in (pair.partition("=") for pair in pairs.split())}


ABORTS = Hazard(
    "reads-empty",
    "reading an output without elements aborts the process where undefined behavior is checked, as in debug builds",
    "2.0.0-rc.11",
)
"""Source: pykeio/ort issue 424; commits 1ab91a2 (rc.10) and ecca246 (rc.11)."""
REFUSES_TO_READ = Hazard("reads-empty", "reading an output without elements gives an error", "2.0.0-rc.11")
REFUSES_TO_MAKE = Hazard(
    "makes-empty", "a tensor with a dimension of 0 is refused when it is made from data", "2.0.0-rc.13"
)
"""Source: pykeio/ort commit e336d6b."""

BINDINGS = (
    Binding("onnxruntime", "PyPI", also=("onnxruntime-gpu", "onnxruntime-directml", "ort")),
    Binding(
        "ort-crate",
        "the crate `ort` of Rust (pykeio/ort)",
        also=("ort-rs", "pykeio-ort", "ort-sys", "rust-ort"),
        ships=ORT_CRATE,
        hazards=((REFUSES_TO_READ, _BEFORE_RC10), (ABORTS, ("2.0.0-rc.10",)), (REFUSES_TO_MAKE, _UP_TO_RC12)),
    ),
    Binding("onnxruntime-node", "npm: numbered as the runtime it holds"),
    Binding("onnxruntime-web", "npm: numbered as the runtime it is compiled from"),
    Binding("onnxruntime-react-native", "npm: numbered as the runtime it holds"),
    Binding(
        "Microsoft.ML.OnnxRuntime",
        "NuGet: numbered as the runtime it holds",
        also=("Microsoft.ML.OnnxRuntime.Gpu", "Microsoft.ML.OnnxRuntime.DirectML", "csharp", "nuget"),
    ),
    Binding(
        "com.microsoft.onnxruntime",
        "Maven: numbered as the runtime it holds",
        also=("com.microsoft.onnxruntime:onnxruntime", "com.microsoft.onnxruntime:onnxruntime-android", "java"),
    ),
    Binding(
        "transformers.js",
        "dependency onnxruntime-node of @huggingface/transformers and @xenova/transformers on npm",
        also=("@huggingface/transformers", "@xenova/transformers"),
        ships=_read_ships("3.0.0=1.19.2 3.3.3=1.20.1 3.5.2=1.21.0 3.7.6=1.21.0 3.8.1=1.21.0 4.0.0=1.24.3 4.3.1=1.30.0"),
    ),
    Binding(
        "onnxruntime-php",
        "CHANGELOG of ankane/onnxruntime-php",
        also=("ankane/onnxruntime",),
        ships=_read_ships(
            "0.1.5=1.15.0 0.1.6=1.16.0 0.1.7=1.16.0 0.1.8=1.16.0 0.2.0=1.17.0 "
            "0.2.1=1.18.0 0.2.2=1.19.2 0.2.3=1.19.2 0.2.4=1.20.0 0.2.5=1.21.0 0.2.6=1.21.0 0.2.7=1.22.0"
        ),
    ),
)


def find(name: str) -> Binding | None:
    """The binding of that name, however it is spelt."""
    wanted = name.lower()
    return next((b for b in BINDINGS if wanted in map(str.lower, (b.name, *b.also))), None)
