"""The tables of ``penstock top``: their columns, headlines, sparklines and changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..views.page import View
from ..views.pages import ACTIONS, PAGES
from ..views.words import duration, length_of_time, moment, number, percent, size, state_words
from .details import engine_text, parked_text, request_text
from .table import Choice, Column, Detail, Jump, Move, Offer, Row, Table

_PAGES = {page.name: page for page in PAGES}
_ACTIONS = {action.path: action for action in ACTIONS}
SPARK_WIDTH = 40
MAX_PROBLEMS = 2
_BLOCKS = "▁▂▃▄▅▆▇█"


def _offer(path: str, question: str, form: dict[str, str], word: str = "yes") -> Offer:
    return Offer(_ACTIONS[path], question, (Choice("y", word, form),))


def _needs_row(make: Callable[[Row, View], Offer]) -> Callable[[Row | None, View], Offer | None]:
    """Wrap a function of a row to return None in an empty table."""
    return lambda row, view: None if row is None else make(row, view)


def _pause_or_resume(model: str, *, is_paused: bool) -> Offer:
    """Return the change that pauses or resumes a queue."""
    if is_paused:
        return _offer("/queue/resume", f"resume the queue of {model}?", {"model": model})
    keep = Choice("y", "yes, running requests keep running", {"model": model})
    requeue = Choice("r", "yes, and requeue running requests", {"model": model, "requeue": "1"})
    return Offer(_ACTIONS["/queue/pause"], f"pause the queue of {model}?", (keep, requeue))


@_needs_row
def _pause_row(row: Row, _: View) -> Offer:
    return _pause_or_resume(row["model"], is_paused=row["state"] == "paused")


def _pause_shown(_: Row | None, view: View) -> Offer | None:
    return _pause_or_resume(view["model"], is_paused=view["stats"].is_paused) if view["model"] else None


@_needs_row
def _purge_tenant(row: Row, view: View) -> Offer:
    form = {"model": view["model"], "tenant": row["tenant"]}
    return _offer("/queue/purge", f"cancel all {row['waiting']} waiting requests of tenant {row['tenant']}?", form)


@_needs_row
def _cancel_request(row: Row, _: View) -> Offer:
    form = {"model": row["model"], "id": row["request"]}
    return _offer("/request/cancel", f"cancel request {row['request']}, even if a caller waits for it?", form)


@_needs_row
def _retry_request(row: Row, _: View) -> Offer:
    form = {"model": row["model"], "id": row["request"]}
    return _offer("/request/retry", f"queue request {row['request']} again, from its prompt?", form)


@_needs_row
def _sleep_or_wake(row: Row, _: View) -> Offer:
    form = {"engine": row["engine"], "of": row["model"]}
    if row["state"] == "sleeping":
        return _offer("/engines/wake", f"wake engine {row['engine']}?", form)
    return _offer("/engines/sleep", f"send engine {row['engine']} to sleep? its requests are queued again", form)


@_needs_row
def _unload_or_load(row: Row, _: View) -> Offer:
    form = {"device": row["device"], "model": row["model"]}
    if row["state"] == "awake":
        return _offer("/devices/unload", f"put {row['model']} to sleep until it is loaded?", form)
    return _offer("/devices/load", f"load {row['model']} now? other models may have to leave", form)


@_needs_row
def _pin_or_unpin(row: Row, _: View) -> Offer:
    form = {"device": row["device"], "model": row["model"]}
    if row["is_pinned"]:
        return _offer("/devices/unpin", f"let {row['model']} leave the device again?", form)
    return _offer("/devices/pin", f"load {row['model']}, and never let it leave the device?", form)


@_needs_row
def _drain_worker(row: Row, _: View) -> Offer:
    question = f"drain worker {row['worker']}? it claims no more requests and leaves when the running ones have ended"
    return _offer("/workers/drain", question, {"worker": row["worker"]})


@_needs_row
def _stop_worker(row: Row, _: View) -> Offer:
    question = f"stop worker {row['worker']} immediately? other engines resume its requests, or they wait for one"
    return _offer("/workers/stop", question, {"worker": row["worker"]})


@_needs_row
def _replay_parked(row: Row, _: View) -> Offer:
    form = {"model": row["model"], "id": row["request"]}
    return _offer("/dead/replay", f"queue request {row['request']} again, from its prompt?", form)


@_needs_row
def _replay_input(row: Row, view: View) -> Offer:
    num = sum((other["input_hash"], other["model"]) == (row["input_hash"], row["model"]) for other in view["rows"])
    form = {"model": row["model"], "hash": row["input_hash"]}
    return _offer("/dead/replay-input", f"queue all requests with this input again? {num} are shown", form)


@_needs_row
def _purge_parked(row: Row, _: View) -> Offer:
    form = {"model": row["model"], "id": row["request"]}
    return _offer("/dead/purge", f"purge request {row['request']}?", form)


def _overview_lines(view: View) -> list[str]:
    """Return the problems, and a sparkline of tokens per second in the last hour."""
    lines = _problem_lines([problem["text"] for problem in view["problems"]]) or ["no problems"]
    tokens = view["history"]["charts"][0]["rows"]
    if tokens:
        values = [row["tokens_out_per_s"] or 0.0 for row in tokens]
        lines.append(f"tokens/s, last hour {spark(values, SPARK_WIDTH)} at most {number(max(values))}")
    return lines


def _queue_lines(view: View) -> list[str]:
    if not view["model"]:
        return ["no models: no worker has served on this Redis yet"]
    stats = view["stats"]
    state = "PAUSED" if stats.is_paused else "open"
    wait = duration(stats.estimated_wait_s)
    bands = ", ".join(f"{band.band} {number(band.depth)}" for band in stats.bands)
    count = _count_words(view["num_tenants"], "tenant")
    first = f"{view['model']}: {state}, {number(stats.depth)} waiting ({bands}), {number(stats.num_running)} running"
    return [first, f"est wait {wait}, {count}" + ("" if view["is_sorted"] else ", by name: q=TEXT in the filter")]


def _requests_lines(view: View) -> list[str]:
    if not view["model"]:
        return ["no models: no worker has served on this Redis yet"]
    selection = f"shown: {view['words']}" if view["is_filtered"] else f"at most {view['most']} of each are shown"
    return [
        f"{view['model']}: {number(view['num_running'])} running, {number(view['num_waiting'])} waiting; {selection}"
    ]


def _engines_lines(view: View) -> list[str]:
    errors = [f"{row['engine']}: {row['error']}" for row in view["rows"] if row["error"]]
    return [
        f"{_count_words(len(view['rows']), 'engine')} of {_count_words(len(view['workers']), 'worker')}",
        *map(str, view["drains"]),
        *_problem_lines(errors),
    ]


def _devices_lines(view: View) -> list[str]:
    """Return the memory of the devices and their last swaps."""
    devices = view["devices"]
    if not devices:
        return ["no device has several models"]
    return [
        f"{device['name']}: {size(device['used_bytes'])} of {size(device['budget_bytes'])}, "
        f"swaps {device['swap_share']:.0%}, debt {device['debt_s']:.1f} s; last: {device['last_swap'] or 'none'}"
        for device in devices[:MAX_PROBLEMS]
    ]


def _dead_lines(view: View) -> list[str]:
    return [f"{number(view['num_parked'])} parked; at most {view['most']} of a model are shown"]


def _open_request(row: Row, _: View) -> Detail:
    params = {"model": row["model"], "id": row["request"]}
    return Detail(_PAGES["request"], params, request_text)


def _open_engine(row: Row, _: View) -> Detail:
    engine_id = row["engine"]
    return Detail(_PAGES["engines"], {"model": row["model"]}, lambda view: engine_text(view, engine_id))


def _open_device_model(row: Row, _: View) -> Jump:
    return Jump("Tenants", row["model"])


def _open_parked(row: Row, _: View) -> Detail:
    return Detail(_PAGES["parked"], {"model": row["model"], "id": row["request"]}, parked_text)


def _problem_lines(messages: list[str]) -> list[str]:
    """Return the first messages, each on its line, and the number of the others."""
    lines = [f"! {' '.join(message.split())}" for message in messages[:MAX_PROBLEMS]]
    if len(messages) > MAX_PROBLEMS:
        lines[-1] += f" (and {len(messages) - MAX_PROBLEMS} more)"
    return lines


def _count_words(num: int, word: str) -> str:
    return f"{number(num)} {word}{'' if num == 1 else 's'}"


def _lanes(lanes: dict[str, int]) -> str:
    return " ".join(f"{band} {depth}" for band, depth in lanes.items()) or "-"


def spark(values: Sequence[float], width: int) -> str:
    """Return a block for each of the newest ``width`` values, the highest for the largest of them."""
    newest = values[-width:]
    limit = max(newest, default=0.0)
    if limit <= 0:
        return _BLOCKS[0] * len(newest)
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, int(value / limit * len(_BLOCKS)))] for value in newest)


MODELS = Table(
    "Models",
    _PAGES["overview"],
    (
        Column("MODEL", "model"),
        Column("STATE", "state"),
        Column("WAITING", "waiting", number, True),
        Column("EST. WAIT", "estimated_wait_s", duration, True),
        Column("RUNNING", "running", number, True),
        Column("TOKENS/S", "tokens_per_s", number, True),
        Column("TTFT P50", "ttft_p50_s", length_of_time, True),
        Column("PARKED", "parked", number, True),
        Column("ENGINES", "engines", number, True),
        Column("OLDEST", "oldest_age_s", duration, True),
        Column("ITL P50", "itl_p50_s", length_of_time, True),
        Column("TTFT P99", "ttft_p99_s", length_of_time, True),
        Column("TOKENS WAITING", "waiting_tokens", number, True),
        Column("REQ/S", "requests_per_s", number, True),
    ),
    identity=("model",),
    headline=_overview_lines,
    opens=lambda row, _: Jump("Tenants", row["model"]),
    moves=(Move("p", "pause/resume", _pause_row),),
)


TENANTS = Table(
    "Tenants",
    _PAGES["queue"],
    (
        Column("TENANT", "tenant"),
        Column("WAITING", "waiting", number, True),
        Column("EST. WAIT", "estimated_wait_s", duration, True),
        Column("OLDEST", "oldest_age_s", duration, True),
        Column("RUNNING", "running", number, True),
        Column("WEIGHT", "weight", number, True),
        Column("SHARE", "share", percent, True),
        Column("BANDS", "lanes", _lanes),
        Column("TOKENS WAITING", "waiting_tokens", number, True),
        Column("OVER QUOTA", "blocked_for_s", duration, True),
    ),
    identity=("tenant",),
    headline=_queue_lines,
    opens=lambda row, view: Jump("Requests", view["model"], f"tenant={row['tenant']}"),
    moves=(Move("p", "pause/resume", _pause_shown), Move("x", "purge", _purge_tenant)),
    has_model=True,
)


REQUESTS = Table(
    "Requests",
    _PAGES["requests"],
    (
        Column("REQUEST", "request"),
        Column("STATE", "state", state_words),
        Column("TENANT", "tenant"),
        Column("TOKENS", "output_tokens", number, True),
        Column("REQUESTS AHEAD", "position", number, True),
        Column("EST. START", "estimated_start_s", duration, True),
        Column("ENGINE", "engine"),
        Column("BAND", "band"),
        Column("WAITED", "waited_s", length_of_time, True),
        Column("RAN FOR", "took_s", length_of_time, True),
        Column("ATTEMPTS", "attempts", number, True),
        Column("LAST CHANGE (UTC)", "moved_at", moment),
        Column("CAUSE", "cause"),
    ),
    identity=("model", "request"),
    headline=_requests_lines,
    opens=_open_request,
    moves=(Move("c", "cancel", _cancel_request), Move("r", "retry", _retry_request)),
    has_model=True,
)


ENGINES = Table(
    "Engines",
    _PAGES["engines"],
    (
        Column("ENGINE", "engine"),
        Column("STATE", "state_words"),
        Column("RESTARTS", "restarts", number, True),
        Column("RUNNING", "running", number, True),
        Column("KV CACHE", "kv_cache_usage", percent, True),
        Column("TOKENS/S", "tokens_per_s", number, True),
        Column("STEP", "step_p50_s", length_of_time, True),
        Column("MEMORY", "core_memory_bytes", size, True),
        Column("QUEUED INSIDE", "waiting_inside", number, True),
        Column("MODEL", "model"),
        Column("WORKER", "worker"),
        Column("DEVICE", "device"),
        Column("DEVICE MEMORY", "device_memory_bytes", size, True),
        Column("GPU", "gpu_busy_share", percent, True),
        Column("GPU MEMORY", "gpu_used_bytes", size, True),
        Column("POWER W", "gpu_power_w", number, True),
        Column("TEMP C", "gpu_temperature_c", number, True),
        Column("LAST ERROR", "error"),
    ),
    identity=("engine",),
    headline=_engines_lines,
    opens=_open_engine,
    moves=(Move("d", "drain", _drain_worker), Move("z", "sleep/wake", _sleep_or_wake), Move("x", "stop", _stop_worker)),
)


DEVICES = Table(
    "Devices",
    _PAGES["devices"],
    (
        Column("MODEL", "model"),
        Column("STATE", "state_words"),
        Column("LATE", "lateness", number, True),
        Column("WAKE", "wake_s", length_of_time, True),
        Column("MEMORY", "device_bytes", size, True),
        Column("DEVICE", "device"),
        Column("STANDS", "standing_s", length_of_time, True),
        Column("WEIGHTS", "weight_bytes", size, True),
        Column("ENGINE", "engine"),
        Column("ERROR", "error"),
    ),
    identity=("device", "model"),
    headline=_devices_lines,
    opens=_open_device_model,
    moves=(Move("z", "sleep/wake", _unload_or_load), Move("p", "pin/unpin", _pin_or_unpin)),
)


DEAD = Table(
    "Dead letter",
    _PAGES["dead"],
    (
        Column("REQUEST", "request"),
        Column("CAUSE", "cause"),
        Column("ENGINE DEATHS", "deaths", number, True),
        Column("ENGINE", "engine"),
        Column("MODEL", "model"),
        Column("PARKED (UTC)", "parked_at", moment),
        Column("ATTEMPTS", "deliveries", number, True),
        Column("TOKENS", "output_tokens", number, True),
        Column("INPUT", "input_hash"),
    ),
    identity=("model", "request"),
    headline=_dead_lines,
    opens=_open_parked,
    moves=(
        Move("r", "retry", _replay_parked),
        Move("R", "retry input", _replay_input),
        Move("x", "purge", _purge_parked),
    ),
)


TABLES = (MODELS, TENANTS, REQUESTS, ENGINES, DEAD, DEVICES)
