"""Every message between processes, and its sender.

    client ──EngineCoreRequest, InputChunk──▶ Redis ──▶ worker process ──CoreInput──▶ engine core
    client ◀──────Delta────────── channel and log ◀── worker process ◀──CoreOutput── engine core
    operator ──WorkerCommand──▶ supervisor;   broker ──EngineCommand──▶ worker process ──WorkerStatus──▶ supervisor

A file for each pair: ``requests`` (client to worker process), ``deltas`` (worker process to client), ``core`` (worker
process and engine core, and data-parallel ranks among each other), ``supervision`` (operators and supervisors to
workers, and back). ``outcome`` has the parts about a request that several of them share.
Calls to an engine and their answers are in ``shared/control``.

All are msgspec structs encoded as positional msgpack arrays: the order of fields **is** the wire format, new
fields are only appended and have a default, so that old bytes still decode (tests/compat holds some). A tag in
the first place distinguishes the members of a union. No method names and no pickle are sent.
Names and meanings follow vLLM's engine (``vllm/v1/engine``) where it has them.
"""

WIRE_VERSION = 1
