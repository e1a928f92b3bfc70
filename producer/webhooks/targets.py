"""Check that the events of a webhook can be delivered, before its request is accepted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from ...shared.connection import CommandConnection
from ...shared.errors import ValidationError
from ...shared.keys import Keys
from ...shared.messages.requests import EngineCoreRequest
from ...shared.values.shown import shown
from .addresses import Networks, check_literal, check_url
from .events import EventFamily, WebhookTarget
from .secrets import SecretStore, SignedTargets, no_secret

_networks_decoder = msgspec.json.Decoder(list[str])


class WebhookTargets:
    """Checks the targets of one namespace."""

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._signed = SignedTargets(connection, keys)

    async def admit(self, target: WebhookTarget) -> None:
        """Check that events to ``target`` can be signed and sent, and register its outbox.

        Raises:
            ValidationError: its tenant has no secret, or no jobs process may call its address.
        """
        execute = self._connection.execute
        registration = [execute("SADD", self._keys.webhook_models(), target.model)] if target.model else []
        lookup = self._signed.has(target.tenant, target.url)
        is_signed, (networks, *_) = await asyncio.gather(
            lookup, asyncio.gather(execute("GET", self._keys.webhook_networks()), *registration)
        )
        if not is_signed:
            raise ValidationError(f"webhook_url: {no_secret(target.tenant)}")
        if networks is not None:
            # Unknown until a jobs process has published its networks.
            check_literal(target.url, Networks(_networks_decoder.decode(networks)))

    async def publish(self, allowed: tuple[str, ...]) -> None:
        """Publish the networks that jobs processes may call in addition to public ones, and index the secrets."""
        await self._connection.execute("SET", self._keys.webhook_networks(), msgspec.json.encode(allowed))
        await SecretStore(self._connection, self._keys).index()


def webhook_target(request: EngineCoreRequest, options: Mapping[str, Any]) -> WebhookTarget | None:
    """Return the receiver of a request's event; None if its options name none.

    Raises:
        ValidationError: ``webhook_url`` or ``webhook_events`` is invalid.
    """
    url, family = options.get("webhook_url"), options.get("webhook_events")
    if family is not None and (family not in list(EventFamily) or url is None):
        raise ValidationError(
            f"webhook_events must be one of {', '.join(EventFamily)}, together with a webhook_url, got {shown(family)}"
        )
    if url is None:
        return None
    family = EventFamily.REQUEST if family is None else EventFamily(family)
    return WebhookTarget(url=check_url(url), tenant=request.tenant, model=request.model, family=family)


def encode_target(target: WebhookTarget) -> str:
    """Return the target as stored with a request (as text, since Redis's msgpack has no bytes)."""
    return msgspec.json.encode(target).decode()
