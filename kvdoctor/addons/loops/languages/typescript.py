"""TypeScript: the program in JavaScript, whose types the compiler checks and writes as declarations."""

from dataclasses import replace

from kvdoctor.addons.loops.languages.javascript import LANGUAGE as JAVASCRIPT

LANGUAGE = replace(
    JAVASCRIPT,
    name="typescript",
    title="TypeScript",
    program="javascript",
    build=(("npm", "install", "--no-audit", "--no-fund", "--loglevel=error"), ("npx", "tsc")),
)
