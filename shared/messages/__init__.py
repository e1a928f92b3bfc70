"""Every message that crosses a process border, and who sends it.

    client ──EngineCoreRequest, InputChunk──▶ Redis ──▶ worker process ──CoreInput──▶ engine core
    client ◀──────Delta────────── channel and log ◀── worker process ◀──CoreOutput── engine core
    operator ──WorkerCommand──▶ supervisor;   broker ──EngineCommand──▶ worker process ──WorkerStatus──▶ supervisor

A file for each who speaks and whom to: ``requests`` (client to worker process), ``to_core``, ``from_core`` (worker
process and engine core), ``deltas`` (worker process to client), ``commands`` (to worker process and supervisor),
``worker_status`` (worker process to supervisor); ``outcome`` has what several of them say of a request.
What may be asked of an engine, and its answers, are in ``shared/control``.

All are msgspec structs encoded as positional msgpack arrays: the order of fields **is** the wire format, new
fields are only appended and carry a default, so that old bytes still decode (tests/compat holds some). A tag in
the first place tells the members of a union apart; there are no method names and no pickle on any wire.
Names and meanings follow vLLM's engine (``vllm/v1/engine``) where it has them.
"""

WIRE_VERSION = 1
