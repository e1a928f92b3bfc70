"""Search for schemas whose grammars let through texts that they forbid, without an end.

python -m tests.unit.engine.structured.hunt [NUMBER] [SEED]
"""

from __future__ import annotations

import json
import sys
import time
from random import Random

from .drawn_schemas import SchemaSource
from .walking import compiled, fault_of, load

BACKENDS: tuple[str, ...] = ("xgrammar", "llguidance")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(number: int, seed: int) -> int:
    """Print each fault with its schema; returns how many there are."""
    backends = {name: load(name) for name in BACKENDS}
    faults, accepted = 0, dict.fromkeys(BACKENDS, 0)
    for index in range(number):
        schema = SchemaSource(Random(f"{seed}/{index}")).document()
        for name, backend in backends.items():
            started_s = time.monotonic()
            grammar = compiled(backend, schema, is_tight=index % 2 == 0)
            accepted[name] += grammar is not None
            fault = None if grammar is None else fault_of(grammar, schema)
            if fault is not None:
                faults += 1
                _say(f"{name} {index}: {fault}\n    {json.dumps(schema)}")
            if time.monotonic() - started_s > 5:
                _say(f"slow: {name} {index} {json.dumps(schema)}")
    _say(f"{faults} faults in {number} schemas; accepted: {accepted}")
    return faults


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    sys.exit(min(main(*(arguments + [1000, 0][len(arguments) :])), 1))
