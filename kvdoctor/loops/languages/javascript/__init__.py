"""JavaScript: the TypeScript of the same templates, with the types in JSDoc."""

from kvdoctor.loops.language import Language
from kvdoctor.loops.languages.typescript import FILTERS, expressions
from kvdoctor.loops.languages.typescript.annotations import Annotations

LANGUAGE = Language(
    name="javascript",
    title="JavaScript",
    files={
        "loop.js": "_script/loop.j2",
        "probe.js": "_script/probe.j2",
        "main.js": "_script/main.j2",
        "package.json": "_script/package.json.j2",
        ".npmrc": "_script/npmrc.j2",
    },
    probe_files={
        "index.html": "_script/index.html.j2",
        "page.js": "_script/page.j2",
        "serve.mjs": "_script/serve.mjs.j2",
    },
    filters={**FILTERS, **Annotations(typed=False).filters},
    build=(("npm", "install", "--no-audit", "--no-fund", "--loglevel=error"),),
    run=("node", "main.js"),
    tools=("node", "npm"),
    refuses=expressions.refuses,
)
