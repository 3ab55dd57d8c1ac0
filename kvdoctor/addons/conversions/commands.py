"""`kvdoctor convert`: a healthy decoder in another form."""

from typing import Any, NoReturn

import click

from kvdoctor.cli.options import command, examples, table_options
from kvdoctor.cli.output import copy_options, finish_copy, output_options


@command(
    "Convert a decoder to another form, proved.",
    epilog=examples(
        ("kvdoctor convert exports/llama -o phone --cache static=512", "a buffer that is written in place"),
        ("kvdoctor convert exports/cacheless -o cached --cache growing", "a cache for a decoder that has none"),
        ("kvdoctor convert exports/llama -o small --logits last", "the logits of the last token alone"),
        ("kvdoctor convert exports/llama -o narrow --cache-type int8", "a narrower cache"),
        ("kvdoctor convert exports/marian -o merged --layout merged", "one graph for both steps"),
    ),
)
@click.argument("path", type=click.Path())
@copy_options("the converted copy")
@table_options("convert")
@output_options()
def convert(path: str, **given: Any) -> NoReturn:
    """Convert a healthy decoder to another form, prove it against the original, and write a fix report with it.

    Faults that stand in the way are repaired first. A copy that is not proved is never written (docs/conversions.md).
    """
    from kvdoctor.addons.conversions import api

    finish_copy(api.convert, given, path, "the converted copy")
