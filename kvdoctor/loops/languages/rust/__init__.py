"""Rust, with the crate `ort`: values go from step to step as the runtime made them."""

from kvdoctor.loops.language import Language
from kvdoctor.loops.languages.rust import expressions

ORT = "2.0.0-rc.15"
"""The release that the manifest pins. The program builds with 2.0.0-rc.10 as well: it uses what both have."""

DYNAMIC = ("--release", "--quiet", "--no-default-features", "--features", "dynamic")

LANGUAGE = Language(
    name="rust",
    title="Rust",
    files={
        "src/lib.rs": "lib.rs.j2",
        "src/providers.rs": "providers.rs.j2",
        "src/trace.rs": "trace.rs.j2",
        "src/main.rs": "main.rs.j2",
        "src/probe.rs": "probe.rs.j2",
        "src/request.rs": "request.rs.j2",
        "Cargo.toml": "Cargo.toml.j2",
        "rustfmt.toml": "rustfmt.toml.j2",
    },
    filters={
        "literal": expressions.literal,
        "option": expressions.option,
        "type": expressions.rust_type,
        "axis": expressions.axis,
        "shape": expressions.shape,
        "array": expressions.array,
        "inputs": expressions.inputs,
        "makes": expressions.makes,
        "takes_ids": expressions.takes_ids,
        "push": expressions.push,
        "conversions": expressions.conversions,
        "makes_mask": expressions.makes_mask,
        "carries": expressions.carries,
        "read_types": expressions.read_types,
        "variant": expressions.variant,
        "ort": lambda _: ORT,
    },
    build=(("cargo", "build", *DYNAMIC),),
    run=("cargo", "run", *DYNAMIC, "--"),
    tools=("cargo",),
    # A folder of its own: in a shared one, cargo takes another project of this name for the same one if it is newer.
    environment={"ORT_DYLIB_PATH": "{onnxruntime}", "CARGO_TARGET_DIR": "target"},
    refuses=expressions.refuses,
)
