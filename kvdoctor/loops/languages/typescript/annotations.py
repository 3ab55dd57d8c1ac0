"""Types in the two ways that the templates of `_script` print them: in the language itself, or in comments (JSDoc)."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvdoctor.loops.languages.typescript.expressions import WIDTH, fitted

Described = Sequence[str]
"""A name, its type, and optionally a text. A name that ends with `?` may be left out."""


class Annotations(NamedTuple):
    """The filters that differ between TypeScript (`typed`) and JavaScript."""

    typed: bool

    @property
    def filters(self) -> dict[str, Callable[..., Any]]:
        """By the names that templates have for them."""
        return {
            "ts": lambda text: text if self.typed else "",
            "js": lambda text: "" if self.typed else text,
            "doc": self.doc,
            "signature": self.signature,
            "record": self.record,
            "field": self.field,
            "cast": self.cast,
        }

    def doc(self, text: str, indent: int, params: Sequence[Described] = (), returns: str = "") -> str:
        """The comment before a function; in TypeScript only what its types do not say."""
        lines = text.split("\n")
        tags = [self._param(*one) for one in params if len(one) > 2 or not self.typed]
        if returns and not self.typed:
            tags.append(f"@returns {{{returns}}}")
        return _comment([*lines, *([""] if tags and lines[-1] else []), *tags], indent)

    def _param(self, name: str, kind: str, text: str = "") -> str:
        said = f" - {text}" if text else ""
        if self.typed:
            return f"@param {name.rstrip('?')}{said}"
        return f"@param {{{kind}}} {_optional(name)}{said}"

    def signature(self, name: str, params: Sequence[Described], returns: str, *, exported: bool = False) -> str:
        """The head of a function of the module: on one line where it fits, else a parameter a line."""
        head = f"{'export ' * exported}{'async ' * returns.startswith('Promise')}function {name}("
        return fitted([self._declared(*one) for one in params], head, f"): {returns} {{" if self.typed else ") {")

    def _declared(self, name: str, kind: str, text: str = "", default: str = "") -> str:  # noqa: ARG002
        if default:
            return f"{name} = {default}"
        return f"{name}: {kind}" if self.typed else name.rstrip("?")

    def record(self, fields: Sequence[Described], name: str, text: str) -> str:
        """An interface that is exported, or a type definition in a comment."""
        if not self.typed:
            tags = [f"@property {{{kind}}} {_optional(field)} - {said}" for field, kind, said in fields]
            return _comment([text, "", f"@typedef {{object}} {name}", *tags], 0)
        members = "".join(f"  /** {said} */\n  readonly {field}: {kind};\n" for field, kind, said in fields)
        return f"/** {text} */\nexport interface {name} {{\n{members}}}"

    def field(self, name: str, kind: str, value: str = "") -> str:
        """A private field of a class; without a value it is set once, by the constructor."""
        if self.typed:
            return f"#{name}: {kind} = {value};" if value else f"readonly #{name}: {kind};"
        return f"/** @type {{{kind}}} */\n  #{name}{' = ' * bool(value)}{value};"

    def cast(self, expression: str, kind: str) -> str:
        """An expression of which we know more than its type says."""
        if not self.typed:
            return f"/** @type {{{kind}}} */ ({expression})"
        return f"({expression}) as {kind}" if expression.startswith("await ") else f"{expression} as {kind}"


def _optional(name: str) -> str:
    return f"[{name[:-1]}]" if name.endswith("?") else name


def _comment(lines: Sequence[str], indent: int) -> str:
    if len(lines) == 1 and indent + len(lines[0]) + 7 <= WIDTH:
        return f"/** {lines[0]} */"
    pad = " " * indent
    return "/**\n" + "".join(f"{pad} * {line}".rstrip() + "\n" for line in lines) + f"{pad} */"
