"""The file of results: a line of JSON when a part begins and when it ends, with commit, card and time.

It is the only state between calls. A later call of the same commit on the same card continues with the parts that have
no result, and a part takes as long as it took before on that card.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# A part that was begun this often and never ended takes the device or the machine with it.
MAX_BEGINNINGS = 2
_CUT_OFF = "cut off: it was begun twice and never ended"


class ResultsFile:
    """The results in ``path`` of one commit on one card; results of others are kept.

    Args:
        about: facts of this call, of which ``commit``, ``device`` and ``is_quick`` identify its results.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self._path = path
        self._about = about
        lines = path.read_text().splitlines() if path.exists() else []
        # The last line may be cut off together with the call that wrote it.
        self._lines: list[dict[str, Any]] = [line for text in lines if (line := _decoded(text)) is not None]

    def begin(self, part: str) -> None:
        """Record that a part begins."""
        self._append({"part": part, "state": "begun"})

    def end(self, part: str, result: dict[str, Any]) -> None:
        """Record the result of a part."""
        self._append({"part": part, "state": "ended", "result": result})

    def results(self) -> dict[str, dict[str, Any]]:
        """Return the results by part, in order; a part that was cut off has an error."""
        results = {line["part"]: line["result"] for line in self._own_lines("ended")}
        begun = [line["part"] for line in self._own_lines("begun")]
        for part in begun:
            if part not in results and begun.count(part) >= MAX_BEGINNINGS:
                results[part] = {"error": _CUT_OFF, "seconds": 0.0}
        return results

    def seconds_before(self, part: str) -> float | None:
        """Return how long a part took on this card when it was last measured there; None if it never was."""
        for line in reversed(self._lines):
            if line["state"] == "ended" and line["part"] == part and _card(line) == _card(self._about):
                return line["result"]["seconds"]
        return None

    def _own_lines(self, state: str) -> list[dict[str, Any]]:
        return [line for line in self._lines if line["state"] == state and _owner(line) == _owner(self._about)]

    def _append(self, fields: dict[str, Any]) -> None:
        line = {"at": datetime.now(UTC).isoformat(timespec="seconds"), **self._about, **fields}
        self._lines.append(line)
        with self._path.open("a") as file:
            # A line that was cut off must not swallow this one.
            file.write(f"\n{json.dumps(line)}\n")


def _decoded(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except json.JSONDecodeError:
        return None
    return line if isinstance(line, dict) and "part" in line else None


def _card(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["device"], line["is_quick"]


def _owner(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["commit"], *_card(line)
