"""A worker process without an engine, that does what a file of the test's tells it. See ``StubHost``.

Behaviours, read when it starts:
    serve       as a worker does
    load        never gets ready
    refuse      fails to start
    crash       aborts when ready
    doze        sleeps at level 1
    sleep       sleeps at level 2
    lose-core   reports, when ready, that its core has died
    linger      the same, reports its end, and never exits
    print       prints megabytes without an end of line, and reports that its core has died
    mute        serves, and says nothing more
    stubborn    serves, and leaves only when killed

On standby it serves once it is activated.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from pathlib import Path

LINE_INTERVAL_S = 0.05
NUM_OUTPUT_TOKENS = 77
SLEEP_LEVELS = {"doze": 1, "sleep": 2}


def main() -> None:
    # Without a buffer, which might hold the next line, too, and ``select`` would not see it.
    lines = open(0, "rb", buffering=0)  # noqa: SIM115  # read until this process ends
    config = json.loads(lines.readline())
    file = Path(os.environ["STUB_FOLDER"]) / config["engine_id"]
    behaviour = file.read_text() if file.exists() else "serve"

    def say(state: str, **more: object) -> None:
        beat = {name: config[name] for name in ("worker_id", "engine_id", "engine_name")}
        beat |= {"model": config["engine"]["model"], "host": "stub", "worker_pid": os.getpid(), "core_pid": 1}
        beat |= {"device_memory_bytes": 3 << 30}
        beat |= {"state": state, "stats": {"num_output_tokens": NUM_OUTPUT_TOKENS}}
        level = SLEEP_LEVELS.get(behaviour, config.get("starts_asleep", 0))
        line = {"engine_id": config["engine_id"], "state": state, "heartbeat": beat, "sleep_level": level, **more}
        sys.stdout.write(f"\n{json.dumps(line)}\n")
        sys.stdout.flush()

    # Who is told of a state may signal at once.
    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour in ("stubborn", "linger") else lambda *_: sys.exit(0))
    say("starting")
    if behaviour == "refuse":
        say("failed", code="model_load_error", message="there is no such model")
        sys.exit(1)
    is_waiting = bool(config.get("standby_number"))
    state = "starting" if behaviour == "load" or is_waiting else "ready"
    say(state)
    if behaviour == "crash":
        os.abort()
    if behaviour == "print":
        sys.stdout.write("." * (5 << 20))
    if behaviour in ("lose-core", "print", "linger"):
        say("failed", code="engine_dead", message="the engine core died (killed by signal 11)", num_tokens=7)
        while behaviour == "linger":
            # Again and again, or the supervisor would end it for its silence.
            say("stopped")
            select.select([], [], [], LINE_INTERVAL_S)
        sys.exit(3)
    while True:
        if behaviour != "mute":
            say(state)
        readable, _, _ = select.select([lines] if behaviour != "stubborn" else [], [], [], LINE_INTERVAL_S)
        if readable:
            if not (is_waiting and lines.readline()):
                sys.exit(0)
            is_waiting, state = False, "ready"


main()
