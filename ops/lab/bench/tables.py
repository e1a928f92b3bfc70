"""A table of figures as the reports have them: names on the left, numbers on the right."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table


def figure_table(title: str, first: str, *columns: str) -> Table:
    """Return an empty table whose first column has names."""
    table = Table(title=title)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def add_caption(table: Table, words: str) -> None:
    """Append ``words`` to the caption of a table."""
    table.caption = f"{table.caption}; {words}" if table.caption else words


def describe_versions(name: str, versions: Mapping[str, str]) -> str:
    """Return the versions of ``name`` for a caption."""
    return f"{name}: " + ", ".join(f"{library} {version}" for library, version in versions.items())
