"""Details of a row as text: a request with its timeline and output, an engine, a parked request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from ..views.page import View
from ..views.request import RequestInput
from ..views.words import duration, length_of_time, moment, number, percent, plain, size, state_words

BAR_WIDTH = 20
_HIDDEN = "start `penstock top` with --show-contents to see prompts and outputs"


class _Sheet:
    """A text of headings, facts and blocks. Text of models and users has invisible characters escaped, and is never
    interpreted as markup."""

    def __init__(self, title: str) -> None:
        self.text = Text(no_wrap=False, overflow="fold")
        self.text.append(_one_line(title) + "\n", "bold")

    def facts(self, facts: Mapping[str, object]) -> None:
        visible = {name: _one_line(value) for name, value in facts.items() if value not in (None, "", "-")}
        width = max(map(len, visible), default=0)
        for name, value in visible.items():
            self.text.append(f"{name:<{width}}  ", "dim")
            self.text.append(f"{value}\n")

    def heading(self, words: str) -> None:
        self.text.append(f"\n{words}\n", "bold")

    def block(self, text: object) -> None:
        self.text.append(_lines(text).rstrip("\n") + "\n")


def _lines(text: object) -> str:
    return plain(str(text).replace("\r\n", "\n").replace("\r", "\\x0d").expandtabs(4))


def _one_line(text: object) -> str:
    return _lines(text).replace("\n", " ")


def request_text(view: View) -> Text:
    """Return state, timeline, input and output of a request."""
    status, row = view["status"], view["row"]
    sheet = _Sheet(f"request {view['request_id']} of {view['model']}")
    sheet.facts(
        {
            "state": state_words(status.state),
            "tenant": f"{status.tenant}, band {status.band}",
            "engine": status.engine_id,
            "attempts": status.num_attempts,
            "output tokens": number(status.num_output_tokens),
            "requests ahead": None if status.position is None else f"at most {number(status.position)}",
            "starts in about": None if status.position is None else duration(status.estimated_start_s),
            "arrived": moment(row["arrived_at"]),
            "deadline": moment(status.deadline),
            "finish reason": row["finish_reason"],
            "error": row["error"],
            "prompt tokens": row["prompt_tokens"],
            "waited": _length(row["queue_time_s"]),
            "first token": _length(row["time_to_first_token_s"]),
            "took in all": _length(row["latency_s"]) if row["finish_reason"] else None,
        }
    )
    if view["rows"]:
        sheet.heading("Timeline")
        for span, (start, width) in zip(view["rows"], view["bars"], strict=True):
            sheet.block(f"{_bar(start, width)} {_span_words(span)}")
        last = view["last_event"]
        if last is not None and last.state.is_end:
            cause = f": {last.cause}" if last.cause else ""
            sheet.block(f"{last.kind.value} at {moment(last.at)} with {number(last.num_output_tokens)} tokens{cause}")
    sheet.heading("Output")
    if view["is_expired"]:
        sheet.block("the result has expired; the events are still stored")
    elif view["text"]:
        sheet.block(view["text"])
    else:
        sheet.block("no token yet" if view["output"] is None else _HIDDEN)
    if not view["is_expired"]:
        _add_input(sheet, view["asked"])
    return sheet.text


def _span_words(span: Mapping[str, Any]) -> str:
    words = f"{span['what']} {'on ' + span['engine'] + ' ' if span['engine'] else ''}{length_of_time(span['took_s'])}"
    words += "" if span["ended_at"] else " so far"
    if span["engine"]:
        words += f", resumed after token {number(span['first_token'])}" if span["first_token"] else ""
        words += f", {number(span['tokens'])} tokens" if span["ended_at"] else ""
    if span["then"]:
        words += f"; then {span['then']}" + (f": {span['why']}" if span["why"] else "")
    return words


def _bar(start: float, width: float) -> str:
    """Return a bar for a span with start and width of a total of 100."""
    first = min(BAR_WIDTH - 1, int(start / 100 * BAR_WIDTH))
    count = max(1, min(BAR_WIDTH - first, round(width / 100 * BAR_WIDTH)))
    return "·" * first + "█" * count + "·" * (BAR_WIDTH - first - count)


def engine_text(view: View, engine_id: str) -> Text:
    """Return all data about an engine."""
    row = next((row for row in view["rows"] if row["engine"] == engine_id), None)
    sheet = _Sheet(f"engine {engine_id}")
    if row is None:
        sheet.block("the engine has left")
        return sheet.text
    sheet.facts(
        {
            "model": row["model"],
            "state": row["state"],
            "worker": row["worker"],
            "host": row["host"],
            "device": row["device"],
            "since": moment(row["started_at"]),
            "running": f"{row['running']}, {row['waiting_inside']} queued inside",
            "KV cache": percent(row["kv_cache_usage"]),
            "tokens/s": number(row["tokens_per_s"]),
            "steps": number(row["steps"]),
            "step time": None if row["step_mean_s"] is None else f"{length_of_time(row['step_mean_s'])} on average",
            "memory": size(row["core_memory_bytes"]),
            "device memory": size(row["device_memory_bytes"]),
            "restarts": row["restarts"],
            "restarts at": moment(row["restart_at"]),
        }
    )
    if row["error"]:
        sheet.heading("Last error")
        sheet.block(row["error"])
    return sheet.text


def parked_text(view: View) -> Text:
    """Return cause, traceback and input of a parked request."""
    row = view["row"]
    sheet = _Sheet(f"parked request {row['request']} of {row['model']}")
    sheet.facts(
        {
            "parked": moment(row["parked_at"]),
            "attempts": row["deliveries"],
            "engine deaths in a row": row["deaths"],
            "output tokens": number(row["output_tokens"]),
            "engine": row["engine"],
            "last step": view["last_step"],
            "input hash": row["input_hash"],
        }
    )
    sheet.heading("Cause")
    sheet.block(row["cause"])
    if view["trace"]:
        sheet.heading("Traceback")
        sheet.block(view["trace"])
    _add_input(sheet, view["asked"])
    return sheet.text


def _add_input(sheet: _Sheet, asked: RequestInput | None) -> None:
    sheet.heading("Input")
    if asked is None:
        sheet.block("the input is stored only until the request ends")
        return
    sheet.facts({"tenant": asked.tenant, "prompt": asked.form, **asked.parameters})
    sheet.block(asked.prompt or _HIDDEN)


def _length(seconds: float | None) -> str | None:
    return None if seconds is None else length_of_time(seconds)
