"""Users of Redis with the rights that a process needs and no others, as an ACL file has them.

Commands are those of ``redis_needs.py``, which every process tries when it starts. Roles differ in keys: who serves or
asks has no part in API keys, in operators' keys or in what is due. Within the keys of a model all have the same rights:
the scripts run there with the rights of whoever calls them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import StrEnum

from ..keys import Keys
from ..names import as_literal
from .needs import ARQ_KEYS, NEEDED, NEEDED_FOR_JOBS, NEEDED_FOR_MOVES, NEEDED_FOR_OPERATORS

# Logging in and naming a connection; what of it changes the server or other connections is dangerous by Redis's word.
_CONNECTION = ("+@connection", "-@dangerous")
_ALWAYS = ("MULTI", "EXEC", "DISCARD", "SUBSCRIBE", "UNSUBSCRIBE", "INFO")
# By which arq takes a job before another process does.
_FOR_JOBS = ("WATCH", "UNWATCH")


class Role(StrEnum):
    """Who logs in. OPERATOR is for the commands, the dashboard and the exporter; CLIENT for apps."""

    CLIENT = "client"
    WORKER = "worker"
    GATEWAY = "gateway"
    JOBS = "jobs"
    OPERATOR = "operator"


def user_line(role: Role, namespace: str, password: str) -> str:
    """Return the line of an ACL file that makes the user of a role; the password is in it as a hash.

    Raises:
        ValidationError: the namespace cannot be one.
    """
    hashed = hashlib.sha256(password.encode()).hexdigest()
    return " ".join(["user", role, "on", f"#{hashed}", *rights(role, namespace)])


def rights(role: Role, namespace: str) -> list[str]:
    """Return the words of ``ACL SETUSER`` behind the password: keys, channels, commands."""
    keys = Keys(namespace)
    patterns = [f"~{pattern}" for pattern in _KEYS[role](keys)]
    if role is Role.JOBS:
        patterns.append(f"~{ARQ_KEYS}*")
    commands = [*NEEDED, *_ALWAYS]
    if role is Role.JOBS:
        commands += [*NEEDED_FOR_JOBS, *_FOR_JOBS]
    if role is Role.OPERATOR:
        commands += [*NEEDED_FOR_MOVES, *NEEDED_FOR_OPERATORS]
    allowed = [f"+{name.lower()}" for name in sorted(set(commands))]
    return ["resetchannels", f"&{keys.of_all()}", *patterns, "-@all", *_CONNECTION, *allowed]


def _of_models(keys: Keys) -> list[str]:
    return [
        keys.of_all_models(),
        *map(as_literal, (keys.absent(), keys.models(), keys.layouts(), keys.placements(), keys.engines())),
        *map(as_literal, (keys.adapters(), keys.adapter_numbers(), keys.awaited_models())),
        _begin(keys.engine("")),
    ]


def _of_processes(keys: Keys) -> list[str]:
    return [as_literal(keys.processes()), _begin(keys.process(""))]


def _of_workers(keys: Keys) -> list[str]:
    return [*_of_models(keys), *_of_processes(keys), as_literal(keys.moves())]


def _of_clients(keys: Keys) -> list[str]:
    webhooks = (keys.webhook_models(), keys.webhook_networks(), keys.webhook_secrets())
    return [*_of_models(keys), *map(as_literal, (*webhooks, keys.audit())), keys.batches().pattern]


def _of_gateways(keys: Keys) -> list[str]:
    due = (keys.jobs_due(), keys.job_holders(), keys.webhook_outbox(), keys.api_keys())
    return [*_of_clients(keys), *_of_processes(keys), *map(as_literal, due), keys.responses()]


def _of_jobs(keys: Keys) -> list[str]:
    jobs = [f"{as_literal(keys.jobs())}*", keys.of_webhooks()]
    return [*_of_models(keys), *_of_processes(keys), *jobs, keys.batches().pattern]


_KEYS: dict[Role, Callable[[Keys], list[str]]] = {
    Role.CLIENT: _of_clients,
    Role.WORKER: _of_workers,
    Role.GATEWAY: _of_gateways,
    Role.JOBS: _of_jobs,
    Role.OPERATOR: lambda keys: [keys.of_all()],
}


def _begin(prefix: str) -> str:
    return f"{as_literal(prefix)}*"
