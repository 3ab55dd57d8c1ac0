"""Writes blocks as parts of a page: what is folded opens on a click, pictures are drawn, long tables are cut."""

from collections.abc import Callable, Sequence

from kvdoctor.report import blocks
from kvdoctor.report.blocks import Span, Text, capitalized, pieces, plain
from kvdoctor.report.escaping import shortened
from kvdoctor.report.page import charts, contract_diagram, elements
from kvdoctor.report.page.elements import Content, Element, PagePosition, appendix, chip, code, fold, h, label_list
from kvdoctor.report.wording import format_count

MOST_CARDS, MOST_SHORT, MOST_ROWS, MOST_STEPS = 100, 400, 400, 40
LONGEST_CELL, LONGEST = 400, 1200


def write_section(section: blocks.Section, place: PagePosition, name: str) -> Element | None:
    """A section with the id `name`; None where nothing is in it."""
    content = _write_all(section.content, place.below(name), section.title)
    if not content:
        return None
    title = write_text(capitalized(section.title))
    if section.folded:
        folded = fold(title, *content)
        return appendix(folded) if section.extra else folded
    return elements.section(place, name, title, *content, class_=elements.APPENDIX if section.extra else None)


def _write_all(content: Sequence[blocks.Block], place: PagePosition, title: Text) -> list[Content]:
    made = (_write_block(block, place, str(number), title) for number, block in enumerate(content))
    return [part for part in made if part is not None]


def _write_block(block: blocks.Block, place: PagePosition, name: str, title: Text) -> Content:
    """A block of a section with a title; `name` tells it from the other ones."""
    match block:
        case blocks.Lines(listed=True):
            return elements.bullets(map(write_text, block.lines))
        case blocks.Lines():
            return [h("p", write_text(text), class_="hint" if block.style == "dim" else None) for text in block.lines]
        case blocks.Pairs():
            return label_list((write_text(label), write_value(text)) for label, text in block.rows)
        case blocks.Table():
            return write_table(block, place.id(name), block.title or title)
        case blocks.Cards():
            return write_cards(block.cards, place.within(name))
        case blocks.Picture():
            return _write_picture(block, place.within(name), title)
        case blocks.Section():
            return write_section(block, place, name)


def write_text(text: Text) -> Content:
    """A line: names and values as code, other pieces in the color of their kinds."""
    return [part if isinstance(part, str) else _write_span(part) for part in pieces(text)]


def _write_span(span: Span, longest: int = LONGEST) -> Content:
    match span.kind:
        case "name" | "wrong":
            return code(span.text, longest)
        case "link":
            return span.text  # a link of a page leads to the page itself only
        case "command":
            return h("code", shortened(span.text, longest), class_="copy")
        case kind:
            return chip(span.text, elements.KINDS.get(kind, kind))


def write_value(text: Text) -> Content:
    """The text of a label; a elements.command that it begins with stands in a box from which it is copied."""
    first, *rest = pieces(text)
    if not isinstance(first, Span) or first.kind != "command":
        return write_text(text)
    return elements.command(first.text), h("p", write_text(tuple(rest))) if rest else None


def write_table(table: blocks.Table, name: str, title: Text) -> Content:
    """A table with an id; of very many rows the first ones, of steps the last ones too."""
    rows, left_out = list(table.rows), 0
    if table.of == "step" and len(rows) > MOST_STEPS:
        half, left_out = MOST_STEPS // 2, len(rows) - MOST_STEPS
        rows = [*rows[:half], ("\u2026", *[""] * (len(table.header) - 1)), *rows[-half:]]
    elif len(rows) > MOST_ROWS:
        rows, left_out = rows[:MOST_ROWS], len(rows) - MOST_ROWS
    cells = ([_write_cell(cell) for cell in row] for row in rows)
    caption = plain(capitalized(title))
    return elements.table(name, caption, table.header, cells, table.look), elements.more_line(left_out, table.of)


def _write_cell(cell: Text) -> Content:
    if isinstance(cell, Span) and cell.kind == "wrong":
        return h("td", shortened(cell.text, LONGEST_CELL), class_="wrong")
    if not plain(cell):
        return None
    parts = pieces(cell)
    return [shortened(one, LONGEST_CELL) if isinstance(one, str) else _write_span(one, LONGEST_CELL) for one in parts]


def write_cards(cards: Sequence[blocks.Card], place: PagePosition) -> list[Content]:
    """Findings, each an article; of very many the rest is a line each."""
    made: list[Content] = [_write_card(card, place, place.id(str(n))) for n, card in enumerate(cards[:MOST_CARDS])]
    if rest := cards[MOST_CARDS : MOST_CARDS + MOST_SHORT]:
        short = [shortened(f"{card.title} ({card.place}): {card.cause}", 300) for card in rest]
        made.append(fold(f"{format_count(len(rest), 'more finding')} in one line each", elements.bullets(short)))
    return [*made, elements.more_line(len(cards) - MOST_CARDS - MOST_SHORT, "finding")]


def _write_card(card: blocks.Card, place: PagePosition, name: str) -> Element:
    """What happens, the cache step by step, where and what shows it, and the fix."""
    drawn = None
    if card.picture is not None:
        quote = h("p", "\u201c", card.quote, "\u201d", class_="hint") if card.quote else None
        drawn = write_table(card.picture, f"{name}-cache", card.picture.title), quote
    more = [(f"{label}: ", write_text(text), " \u00b7 ") for label, text in card.more]
    return h(
        "article",
        place.heading(write_title(card), id_=name, class_="finding-title"),
        h("p", card.cause, class_="cause"),
        drawn,
        label_list((label, write_value(text)) for label, text in card.facts),
        h("div", label_list((label, write_value(text)) for label, text in card.fix), class_="repair"),
        h("p", more[:-1], more[-1][:2], class_="hint") if more else None,
        class_=f"finding {card.severity}",
        aria_labelledby=name,
    )


def write_title(card: blocks.Card) -> Content:
    """Severity, code and name of a finding, and its stacks."""
    return (
        chip(card.severity, card.severity),
        " ",
        h("span", card.code, class_="code"),
        " ",
        h("span", card.name, class_="name"),
        h("span", f" in {card.place}", class_="of") if card.place else None,
    )


def _write_picture(picture: blocks.Picture, place: PagePosition, title: Text) -> Content:
    """A drawing; the same in text is printed where all is asked for. Where nothing is drawn, the text alone."""
    drawn = DRAWINGS[picture.name](place, *picture.subject)
    instead = _write_all(picture.instead, place, title)
    if drawn is None:
        return instead or None
    return drawn, appendix(*instead) if instead else None


DRAWINGS: dict[str, Callable[..., Content]] = {
    "loops": charts.draw_loops,
    "contract": contract_diagram.draw_contract,
    "differences": charts.draw_differences,
    "layers": charts.draw_layers,
    "times": charts.draw_times,
}
"""What draws each picture at a position: the arguments that follow are its subject."""
