"""Columns of the pages' tables: their labels, their meanings, and which of them a user has hidden.

A browser keeps the hidden columns in a cookie, as ``engines.steps~requests.band``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

COLUMNS_COOKIE = "penstock_columns"
# Name in the parameters of a page for the value of the cookie; no parameter of a query has it.
HIDDEN = "hidden columns"
MAX_COOKIE_CHARS = 2000
_COOKIE = re.compile(r"[a-z0-9.~-]*")


@dataclass(frozen=True)
class Column:
    """A column: its label, and whether it has numbers, which are aligned to the right."""

    label: str
    is_number: bool = False

    @property
    def slug(self) -> str:
        """Its label as a part of a cookie."""
        return re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")

    @property
    def meaning(self) -> str:
        """Explanation of the label; "" for a label of everyday words."""
        return MEANINGS.get(self.label, "")


@dataclass(frozen=True)
class Table:
    """A table of a page. The first column, and one of buttons, is always visible."""

    key: str
    label: str
    columns: tuple[Column, ...]

    def hidden_classes(self, hidden: str) -> str:
        """Return the classes that hide columns: ``hide-N`` for the column N, from 1."""
        names = set(hidden.split("~"))
        return " ".join(f"hide-{i}" for i, one in enumerate(self.columns, 1) if f"{self.key}.{one.slug}" in names)

    def choices(self, hidden: str) -> list[tuple[Column, str, bool]]:
        """Return the columns that can be hidden, with the field of the form and whether each is visible."""
        names = set(hidden.split("~"))
        fields = [(one, f"{self.key}.{one.slug}") for one in self.columns[1:] if one.label != "Actions"]
        return [(one, field, field not in names) for one, field in fields]


def _table(key: str, label: str, columns: str) -> Table:
    """Return a table of labels that are separated by bars; those of numbers begin with ``#``."""
    names = columns.split("|")
    return Table(key, label, tuple(Column(name.lstrip("#"), name.startswith("#")) for name in names))


MEANINGS: Mapping[str, str] = {
    "Attempts": "How often an engine has started this request, or this event was sent",
    "AOF": "Append-only file: without it a crash of Redis loses requests",
    "Band": "Level of urgency: a higher band is served first",
    "Bands": "Waiting requests by band, the level of urgency",
    "Body": "What is sent to the receiver",
    "Cached tokens": "Prompt tokens that were in a cache already; part of the prompt and embedding tokens",
    "Cause": "Why the request ended, or was parked",
    "Cost": "By the prices that the dashboard was started with",
    "Device memory": "Memory of the device that the engine has reserved",
    "Embedding tokens": "Prompt tokens of requests without output: embeddings and scores",
    "Engine deaths": "Engines that died in a row while they ran this request",
    "Failed": "Requests that ended with an error, or were parked",
    "Est. start": "Estimated time until the request starts",
    "Est. wait": "Estimated wait of a request that arrives now",
    "Evicted": "Keys that Redis has deleted for lack of memory; must be 0",
    "GPU": "Of all processes: share of the last second in which it computed, memory, power and temperature",
    "Identified by": "How the user's name is known",
    "Group": "What the row counts: a tenant, model, day or hour",
    "Images": "Images in prompts",
    "ITL p50": "Inter-token latency: half of the gaps between tokens of the last 5 minutes were at most this long",
    "KV cache": "Used share of the memory for keys and values of running requests",
    "Output tokens": "Tokens that were delivered",
    "Last change": "Time of the last move between states",
    "Models": "Models whose queues this server holds",
    "Oldest": "Wait of the request that has waited longest",
    "Parked": "Requests set aside because engines died on them",
    "Period": "Time after which the budget is renewed",
    "Prompt tokens": "Tokens of prompts, once for all answers to a prompt",
    "Recomputed tokens": "Tokens computed again after the death of an engine; not part of the others",
    "Renewed": "Day (UTC) on which the budget is renewed",
    "Policy": "Whether the tenant has weight and quotas of its own, or those of the queue",
    "Quota": "Whether the tenant is within its limits; requests over quota wait or are refused",
    "Ran for": "From the first start on an engine to the end",
    "Requests": "Requests that ended; each answer to a prompt is one",
    "Requests ahead": "Requests that are served before this one, at most",
    "Restarts": "How often the engine was restarted",
    "Share": "Part of the tokens that waiting tenants get now, by their weights",
    "Spent": "Amount used since the period began",
    "Step": "Mean time of a step, which computes one token of each running request",
    "Steps": "Steps since the engine started",
    "Tokens waiting": "Prompt tokens and max_tokens of waiting requests",
    "Unit": "Tokens, or the currency of the prices",
    "Used": "Spent share of the limit",
    "TTFT p50": "Time to first token: half of the requests of the last 5 minutes got it within this time",
    "TTFT p99": "Time to first token: 99 % of the requests of the last 5 minutes got it within this time",
    "Waited": "From arrival to the first start on an engine",
    "Weight": "Share of a tenant relative to other waiting tenants",
    "When full": "What Redis does at its memory limit; must be noeviction",
}

_MATCHING = _table("matching", "First matching requests", "Request|State|Tenant|Band|Engine|#Tokens|Cause")
_TABLES: Mapping[str, tuple[Table, ...]] = {
    "overview": (
        _table(
            "models",
            "Models",
            "Model|State|#Waiting|#Running|#Est. wait|#Oldest|#TTFT p50|#TTFT p99|#ITL p50|#Tokens/s|#Parked|Engines"
            "|#Tokens waiting",
        ),
    ),
    "queue": (
        _table("bands", "Bands", "Band|#Waiting|#Tokens waiting|#Tenants|#Oldest|#Est. wait"),
        _table(
            "tenants",
            "Tenants",
            "Tenant|#Waiting|#Running|#Oldest|#Est. wait|Quota|#Weight|#Share|Bands|#Tokens waiting|Policy",
        ),
    ),
    "tenant": (_table("lanes", "Bands", "Band|#Waiting|#Tokens waiting|#Oldest|#Est. wait"),),
    "requests": (
        _table(
            "requests",
            "Requests",
            "Request|State|#Waited|#Ran for|#Tokens|#Attempts|Cause|Tenant|Engine|Last change|Band|#Requests ahead"
            "|#Est. start",
        ),
    ),
    "cancel": (_MATCHING,),
    "retry": (_MATCHING,),
    "engines": (
        _table(
            "engines",
            "Engines",
            "Engine|State|Actions|#Restarts|Last error|#Running|KV cache|#Tokens/s|#Step|#Memory|#Device memory|GPU"
            "|Model|Worker|Device|#Steps",
        ),
    ),
    "dead": (_table("parked", "Parked requests", "Request|Parked|#Attempts|#Engine deaths|#Tokens|Engine|Actions"),),
    "batches": (
        _table(
            "batches",
            "Batches",
            "Batch|Status|Done|#Failed|Error|Tenant|Model|Endpoint|Created|Expires|Actions",
        ),
    ),
    "webhooks": (
        _table(
            "events",
            "Webhook events",
            "Event|Type|Tenant|#Attempts|#Last status|Last error|Next attempt|To|Created|Actions",
        ),
    ),
    "webhook": (_table("attempts", "Attempts", "Time|#Took|#Status|Error"),),
    "system": (
        _table("processes", "Processes", "Process|Kind|Version|Started|Last error|Host|#Pid|Options"),
        _table("workers", "Workers", "Worker|Host|#Pid|#Engines|#Memory"),
        _table(
            "servers",
            "Redis servers",
            "Server|#Memory|#Limit|When full|AOF|#Evicted|#Commands/s|#Clients|Role|#Uptime|Version|Models",
        ),
        _table("slow", "Slow calls", "Time|#Took|Command|Script|Key|Server"),
    ),
    "audit": (_table("audit", "Audit", "Time|User|Change|Result|Program|From|Identified by|Redis user"),),
    "usage": (
        _table(
            "usage",
            "Usage",
            "Group|Name|#Requests|#Prompt tokens|#Cached tokens|#Output tokens|#Cost|#Failed|#Embedding tokens"
            "|#Recomputed tokens|#Images",
        ),
        _table("budgets", "Budgets", "Tenant|Key|Period|#Spent|#Limit|Unit|#Used|Renewed"),
    ),
    "operators": (_table("keys", "Operators' keys", "Key|Name|Role|Prompts and outputs|Created|Revoke"),),
}


def tables_of(page_name: str) -> tuple[Table, ...]:
    """Return the tables of a page whose columns are fixed."""
    return _TABLES.get(page_name, ())


def table_of(page_name: str, key: str, *, has_actions: bool) -> Table:
    """Return a table of a page. Operators alone have the column of buttons."""
    table = next(one for one in tables_of(page_name) if one.key == key)
    columns = tuple(one for one in table.columns if has_actions or one.label != "Actions")
    return Table(table.key, table.label, columns)


def hidden_of(cookies: Mapping[str, str]) -> str:
    """Return the hidden columns of a browser; "" if its cookie is missing or not ours."""
    text = cookies.get(COLUMNS_COOKIE, "")
    return text if len(text) <= MAX_COOKIE_CHARS and _COOKIE.fullmatch(text) else ""


def hidden_after(page_name: str, form: Mapping[str, Any], hidden: str) -> str:
    """Return the hidden columns after a form, whose fields are the visible columns of a page. Others stay as before."""
    choices = [choice for table in tables_of(page_name) for choice in table.choices(hidden)]
    own = {field for _, field, _ in choices}
    return "~".join(_unique([one for one in hidden.split("~") if one and one not in own], own - form.keys()))


def _unique(others: Iterable[str], chosen: Iterable[str]) -> list[str]:
    return sorted({*others, *chosen})
