"""Messages show a value of a caller's cut: by ``shown``, not by ``!r``, which writes a megabyte as it is."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("shared", "producer", "worker/text", "worker/serving")
# The operator's own, and checked before.
SHORT = {("shared/redis_access/check.py", "namespace")}


def test_no_message_has_a_value_in_full() -> None:
    places = [
        f"{path.relative_to(ROOT)}:{part.lineno}: {{{ast.unparse(part.value)}!r}}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "!r" in (text := path.read_text())
        for part in ast.walk(ast.parse(text))
        if isinstance(part, ast.FormattedValue) and part.conversion == ord("r")
        if not (isinstance(part.value, ast.Name) and part.value.id.isupper())
        if (str(path.relative_to(ROOT)), ast.unparse(part.value)) not in SHORT
    ]
    assert places == [], "write {shown(value)}, from shared/values/shown.py"
