"""Reports a failed step: the state of scheduler and batch, as one log event and optionally one file.

It contains no prompt and no output unless an operator enables that. Of the parameters only numbers and switches are
shown, because stop strings, schemas and lists of tokens may quote a prompt. The error's message is shown unchanged.
"""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

if TYPE_CHECKING:
    from ..scheduling.request import Request
    from ..scheduling.scheduler import Scheduler
    from ..scheduling.scheduler_output import SchedulerOutput

# A limit, because a repeated failure must not fill the disk.
MAX_FILES = 100

log = structlog.get_logger(__name__)


class StepDump:
    """Writes dumps.

    Args:
        folder: receives a JSON file per failed step; empty for no files.
        shows_prompts: include the token ids of prompts and outputs.
    """

    def __init__(self, folder: str = "", *, shows_prompts: bool = False) -> None:
        self._folder = folder
        self._shows_prompts = shows_prompts
        self._num_files = 0

    def write(self, batch: SchedulerOutput, error: Exception, scheduler: Scheduler, device_memory_bytes: int) -> None:
        """Log the batch whose step raised ``error``, and write its file. A failure to write is only logged."""
        dump = {
            "error": f"{type(error).__name__}: {error}",
            "batch": {
                "num_requests": len(batch.requests),
                "num_tokens": sum(batch.num_new_tokens),
                "released_ids": batch.released_ids,
            },
            "scheduler": msgspec.structs.asdict(scheduler.stats()),
            "num_free_blocks": scheduler.block_pool.num_free,
            "num_blocks": scheduler.block_pool.num_blocks,
            "device_memory_bytes": device_memory_bytes,
            "requests": [self._describe(request, num_new_tokens) for request, num_new_tokens in batch.work()],
        }
        path = self._write_file(dump, error)
        log.error("step_failed", **dump, file=path, exc_info=error)

    def _describe(self, request: Request, num_new_tokens: int) -> dict[str, Any]:
        description = {
            "request_id": request.request_id,
            "status": request.status.value,
            "num_new_tokens": num_new_tokens,
            "num_tokens": request.num_tokens,
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_computed_tokens": request.num_computed_tokens,
            "num_cached_tokens": request.num_cached_tokens,
            "block_table": list(request.block_table),
            "window_tables": [] if request.group_tables is None else request.group_tables.tables[1:],
            "sampling_params": _plain_fields(request.params),
            "is_constrained": request.constraint is not None,
        }
        if self._shows_prompts:
            description["prompt_token_ids"] = request.token_ids[: request.num_prompt_tokens]
            description["output_token_ids"] = request.token_ids[request.num_prompt_tokens :]
        return description

    def _write_file(self, dump: dict[str, Any], error: Exception) -> str | None:
        if not self._folder or self._num_files >= MAX_FILES:
            return None
        trace = "".join(traceback.format_exception(error))
        path = Path(self._folder) / f"step-{time.time_ns()}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.format(msgspec.json.encode({**dump, "trace": trace})))
        except OSError as cause:
            log.warning("dump_not_written", path=str(path), cause=str(cause))
            return None
        self._num_files += 1
        return str(path)


def _plain_fields(params: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that are numbers, switches or unset, and the names of all others as ``omitted``."""
    fields = msgspec.structs.asdict(params)
    plain = {name: value for name, value in fields.items() if value is None or isinstance(value, bool | int | float)}
    return {**plain, "omitted": sorted(fields.keys() - plain.keys())}
