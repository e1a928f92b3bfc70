"""``worker list --plugins``: installed plug-ins for options of worker and gateway. Reads metadata, loads no plug-in."""

from __future__ import annotations

import msgspec

from ...shared.process.command_line import format_table
from ...shared.process.plugins import OPTION_OF_GROUP, plugins_of

_HEADER = ("OPTION", "NAME", "IS", "DISTRIBUTION")


def list_plugins(*, as_json: bool) -> int:
    """Print the plug-ins that each option may name."""
    rows = [
        (option, name, point.value, "" if point.dist is None else f"{point.dist.name} {point.dist.version}")
        for group, option in OPTION_OF_GROUP.items()
        for name, points in plugins_of(group).items()
        for point in points
    ]
    if as_json:
        objects = [dict(zip(("option", "name", "value", "distribution"), row, strict=True)) for row in rows]
        print(msgspec.json.format(msgspec.json.encode(objects)).decode())
    elif rows:
        print(format_table(_HEADER, [list(row) for row in rows]))
    else:
        print("no plug-ins")
    return 0
