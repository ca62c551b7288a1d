"""Builds HTML; every text that is not markup is escaped."""

from __future__ import annotations

from html import escape

_VOID = {"br", "meta", "line", "polyline", "rect", "circle"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *content: str, **attributes: str | float | None) -> Markup:
    """Returns an element.

    Args:
        name: its name.
        content: elements, and texts, which are escaped.
        attributes: `class_` is `class`, and `data_x` is `data-x`. None leaves an attribute out.
    """
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = join(*content)
    return Markup(f"<{name}{named}/>" if name in _VOID else f"<{name}{named}>{inner}</{name}>")


def join(*content: str) -> Markup:
    """Joins elements and texts."""
    return Markup("".join(each if isinstance(each, Markup) else escape(each) for each in content))


def table(head: list[str], rows: list[list[str]], **attributes: str) -> Markup:
    """Returns a table that can be scrolled sideways on a narrow screen."""
    titles = tag("thead", tag("tr", *(tag("th", each) for each in head)))
    body = tag("tbody", *(tag("tr", *(tag("td", each) for each in row)) for row in rows))
    return tag("div", tag("table", titles, body, **attributes), class_="scroll", tabindex=0)


def missing(text: str) -> Markup:
    """Says what is not recorded, and why."""
    return tag("p", text, class_="missing")
