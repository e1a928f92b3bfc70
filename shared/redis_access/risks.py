"""Risks of a Redis for requests, from what it reports: one place for log, `penstock status` and pages."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

FULL_SHARE = 0.8


class Risk(msgspec.Struct, frozen=True, kw_only=True):
    """A setting or state of the server that may cost requests.

    Args:
        code: name of the risk in the log.
    """

    code: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}"


def risks_of(info: Mapping[str, str], shown: str, *, makes_copies: bool | None = None) -> list[Risk]:
    """Return the risks at one server.

    Args:
        info: INFO's fields; missing ones are not judged.
        shown: its URL without password.
        makes_copies: whether it periodically writes a copy of everything (``save``); None if unknown.
    """
    return [*_of_disk(info, shown, makes_copies), *_of_memory(info, shown), *_of_role(info, shown)]


def _of_disk(info: Mapping[str, str], shown: str, makes_copies: bool | None) -> list[Risk]:
    risks = []
    if info.get("aof_enabled") == "0":
        losses = {
            True: "what was accepted since its last copy, which it makes now and then",
            False: "every request that was accepted, and every result",
            None: "what was accepted since its last copy, or everything if it makes none",
        }[makes_copies]
        risks.append(
            Risk(
                code="redis_not_persistent",
                message=f"Redis at {shown} has no append-only file: a crash of it loses {losses}",
                remedy="run 'CONFIG SET appendonly yes' there",
            )
        )
    if info.get("aof_last_write_status", "ok") != "ok":
        risks.append(
            Risk(
                code="redis_cannot_write",
                message=f"Redis at {shown} cannot write its append-only file, and refuses writes until it can",
                remedy="make room on its disk",
            )
        )
    return risks


def _of_memory(info: Mapping[str, str], shown: str) -> list[Risk]:
    most, used, policy = number(info, "maxmemory"), number(info, "used_memory"), info.get("maxmemory_policy")
    risks = []
    if not most:
        return risks
    if policy not in (None, "noeviction"):
        drops = f"Redis at {shown} drops keys when its memory is full (maxmemory-policy is {policy})"
        if policy.startswith("volatile-"):
            # What waits, runs, is configured or parked has no time to live. Servers that others run have no other.
            what = (
                ": results before their time, what counts towards quotas, heartbeats, and the first of several "
                "answers that a webhook is to tell of together, but no request that waits or runs"
            )
            remedy = "where it can be set, 'maxmemory-policy noeviction' keeps them"
        else:
            what, remedy = ", which would lose requests", "run 'CONFIG SET maxmemory-policy noeviction' there"
        risks.append(Risk(code="redis_evicts", message=drops + what, remedy=remedy))
    if used > FULL_SHARE * most:
        risks.append(
            Risk(
                code="redis_nearly_full",
                message=f"Redis at {shown} uses {used / most:.0%} of its memory; when it is full, requests are refused",
                remedy="raise maxmemory, or keep results for a shorter time",
            )
        )
    return risks


def _of_role(info: Mapping[str, str], shown: str) -> list[Risk]:
    """Return the risk of a writable replica, as with ``replica-read-only no``; others refuse to work at all."""
    if info.get("role") != "slave":
        return []
    return [
        Risk(
            code="redis_is_replica",
            message=f"Redis at {shown} is a replica: what is written there is lost when it meets its primary again",
            remedy="give the URL of the primary, or of Sentinels",
        )
    ]


def number(info: Mapping[str, str], name: str) -> int:
    """Return a field that is a whole number; 0 if it is missing."""
    text = info.get(name, "0")
    return int(text) if text.isdecimal() else 0
