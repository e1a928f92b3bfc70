"""A table of figures as the reports have them: names on the left, numbers on the right."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table


def figure_table(title: str, first: str, *columns: str) -> Table:
    """An empty table whose first column holds names."""
    table = Table(title=title)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def add_caption(table: Table, words: str) -> None:
    """Say ``words`` under the table, after what is said there already."""
    table.caption = f"{table.caption}; {words}" if table.caption else words


def told_versions(name: str, versions: Mapping[str, str]) -> str:
    """What ``name`` ran with, for a caption."""
    return f"{name}: " + ", ".join(f"{library} {version}" for library, version in versions.items())
