"""Entries of the audit log as sentences: who changed what, from what to what."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter

from ...shared.deployment.audit import ARROW, AuditEntry

# By action: the verb in the past and after "to", and its object. Names in braces are the target and details.
_CHANGES: Mapping[str, tuple[str, str, str]] = {
    "queue.pause": ("paused", "pause", "the queue of {target}"),
    "queue.resume": ("resumed", "resume", "the queue of {target}"),
    "queue.purge": ("cancelled", "cancel", "the waiting requests of tenant {tenant} for {target}"),
    "queue.configure": ("changed", "change", "the policy of {target}"),
    "queue.configure_tenant": ("changed", "change", "the policy of tenant {tenant} for {target}"),
    "request.cancel": ("cancelled", "cancel", "request {target} of {model}"),
    "request.cancel_all": ("cancelled", "cancel", "requests of {target}"),
    "request.retry": ("retried", "retry", "request {target} of {model}"),
    "request.retry_all": ("retried", "retry", "requests of {target}"),
    "dead.replay": ("retried", "retry", "parked request {target} of {model}"),
    "dead.purge": ("purged", "purge", "parked request {target} of {model}"),
    "dead.replay_all": ("retried", "retry", "parked requests of {target}"),
    "dead.purge_all": ("purged", "purge", "parked requests of {target}"),
    "batch.cancel": ("cancelled", "cancel", "batch {target} of tenant {tenant}"),
    "webhook.replay": ("sent", "send", "webhook event {target} again"),
    "webhook.purge": ("purged", "purge", "webhook event {target}"),
    "worker.drain": ("drained", "drain", "worker {target}"),
    "worker.stop": ("stopped", "stop", "worker {target}"),
    "worker.scale": ("scaled", "scale", "worker {target}"),
    "group.scale": ("scaled", "scale", "group {target} of {model}"),
    "engine.sleep": ("put", "put", "{target} to sleep"),
    "engine.wake_up": ("woke", "wake", "{target}"),
    "engine.reload_weights": ("reloaded", "reload", "the weights of {target}"),
    "model.load": ("loaded", "load", "model {target} on {device}"),
    "model.unload": ("put", "put", "model {target} on {device} to sleep"),
    "model.pin": ("pinned", "pin", "model {target} to {device}"),
    "model.unpin": ("unpinned", "unpin", "model {target} from {device}"),
    "adapter.add": ("added", "add", "adapter {target}"),
    "adapter.remove": ("removed", "remove", "adapter {target}"),
    "adapter.pin": ("pinned or unpinned", "pin or unpin", "adapter {target}"),
    "operator_key.create": ("created", "create", "operator's key {target}"),
    "operator_key.revoke": ("revoked", "revoke", "operator's key {target}"),
    "api_key.create": ("created", "create", "API key {target}"),
    "api_key.revoke": ("revoked", "revoke", "API key {target}"),
    "budget.set": ("set", "set", "a budget of tenant {target}"),
    "budget.remove": ("removed", "remove", "a budget of tenant {target}"),
    "dashboard.login": ("logged in", "log in", "to the dashboard"),
}


def audit_sentence(entry: AuditEntry) -> str:
    """Return a change as a sentence without its subject, the user. Details that it does not name follow."""
    past, infinitive, place = _CHANGES.get(entry.action, (f"did {entry.action}", f"do {entry.action}", "{target}"))
    values = {"target": entry.target or "all", **entry.details}
    names = [name for _, name, _, _ in Formatter().parse(place) if name]
    verb = past if entry.result == "ok" else f"tried to {infinitive}"
    sentence = f"{verb} {place.format(**{name: values.get(name, '?') for name in names})}"
    rest = [_detail(name, value) for name, value in entry.details.items() if name not in names]
    return f"{sentence}: {', '.join(rest)}" if rest else sentence


def _detail(name: str, value: str) -> str:
    words = name.replace("_", " ")
    before, arrow, after = value.partition(ARROW)
    return f"{words} from {before} to {after}" if arrow else f"{words} {value}"
