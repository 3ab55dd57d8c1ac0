"""TypeScript with onnxruntime-node; the loop itself also runs with onnxruntime-web in a browser."""

from collections.abc import Callable, Mapping
from typing import Any

from kvdoctor.loops.language import Language
from kvdoctor.loops.languages.typescript import expressions
from kvdoctor.loops.languages.typescript.annotations import Annotations
from kvdoctor.loops.plan_questions import source_axis

FILTERS: Mapping[str, Callable[..., Any]] = {
    "literal": expressions.literal,
    "keys": expressions.keys,
    "fitted": expressions.fitted,
    "listed": expressions.listed,
    "element_type": expressions.element_type,
    "array_type": expressions.array_type,
    "shape": expressions.shape,
    "local_names": expressions.local_names,
    "feeds_params": expressions.feeds_params,
    "has_mask": expressions.has_mask,
    "bounds_mask": expressions.bounds_mask,
    "made_types": expressions.made_types,
    "number": expressions.number,
    "source_axis": source_axis,
    "value": expressions.value,
    "ids_source": expressions.ids_source,
}
"""What the templates of `_script` use for both languages."""


LANGUAGE = Language(
    name="typescript",
    title="TypeScript",
    files={
        "src/loop.ts": "_script/loop.j2",
        "src/probe.ts": "_script/probe.j2",
        "src/main.ts": "_script/main.j2",
        "package.json": "_script/package.json.j2",
        "tsconfig.json": "tsconfig.json.j2",
        ".npmrc": "_script/npmrc.j2",
    },
    probe_files={
        "index.html": "_script/index.html.j2",
        "src/page.ts": "_script/page.j2",
        "serve.mjs": "_script/serve.mjs.j2",
    },
    filters={**FILTERS, **Annotations(typed=True).filters},
    build=(("npm", "install", "--no-audit", "--no-fund", "--loglevel=error"), ("npx", "tsc")),
    run=("node", "dist/main.js"),
    tools=("node", "npm"),
    refuses=expressions.refuses,
)
