"""Files of requests, run row by row: OpenAI's Files and Batches.

    from penstock.producer.batches import BatchStore, read_local, run_batch

    async with BatchStore("redis://localhost", "/srv/penstock/files") as store:
        file = await store.files.create(read_local(Path("in.jsonl")), filename="in.jsonl")
        batch = await store.create(input_file_id=file.id, endpoint="/v1/chat/completions")
        async with Client.connect("redis://localhost") as client:
            batch = await run_batch(client, store, batch.id)

Each row has exactly one line in the output, no matter which processes die meanwhile; see ``runner.py``.
"""

from .batch_records import Batch, BatchStatus, FileObject, Page
from .batch_store import BatchStore
from .contents import files_folder, read_local
from .files import Files
from .journal import Tally
from .lease import LEASE_TTL_S
from .runner import DEFAULT_WINDOW, ROW_RESULT_TTL_S, OnProgress, run_batch

__all__ = [
    "DEFAULT_WINDOW",
    "LEASE_TTL_S",
    "ROW_RESULT_TTL_S",
    "Batch",
    "BatchStatus",
    "BatchStore",
    "FileObject",
    "Files",
    "OnProgress",
    "Page",
    "Tally",
    "files_folder",
    "read_local",
    "run_batch",
]
