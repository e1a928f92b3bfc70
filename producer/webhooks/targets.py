"""What is checked before anything with a webhook is accepted, so that its events can be delivered at all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from ...shared.connection import CommandConnection
from ...shared.errors import ValidationError
from ...shared.keys import Keys
from ...shared.messages.requests import EngineCoreRequest
from ...shared.shown import shown
from .addresses import Networks, check_literal, check_url
from .event_records import EventFamily, WebhookTarget
from .secrets import SecretStore, SignedTargets, no_secret

_networks_decoder = msgspec.json.Decoder(list[str])


class WebhookTargets:
    """Admits targets of one namespace."""

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._signed = SignedTargets(connection, keys)

    async def admit(self, target: WebhookTarget) -> None:
        """See that events to ``target`` will be found, signed, and may be sent.

        Raises:
            ValidationError: its tenant has no secret, or its address may not be called by any jobs process.
        """
        execute = self._connection.execute
        noting = [execute("SADD", self._keys.webhook_models(), target.model)] if target.model else []
        finding = self._signed.has(target.tenant, target.url)
        is_signed, (networks, *_) = await asyncio.gather(
            finding, asyncio.gather(execute("GET", self._keys.webhook_networks()), *noting)
        )
        if not is_signed:
            raise ValidationError(f"webhook_url: {no_secret(target.tenant)}")
        if networks is not None:
            # Before any jobs process has said which it may call, this cannot be known.
            check_literal(target.url, Networks(_networks_decoder.decode(networks)))

    async def publish(self, allowed: tuple[str, ...]) -> None:
        """Let clients know what jobs processes may call, besides what is public, and for whom there are secrets."""
        await self._connection.execute("SET", self._keys.webhook_networks(), msgspec.json.encode(allowed))
        await SecretStore(self._connection, self._keys).index()


def webhook_target(request: EngineCoreRequest, options: Mapping[str, Any]) -> WebhookTarget | None:
    """Return who is to be told of a request's end; None if its options name nobody.

    Raises:
        ValidationError: ``webhook_url`` or ``webhook_events`` is wrong.
    """
    url, family = options.get("webhook_url"), options.get("webhook_events")
    if family is not None and (family not in list(EventFamily) or url is None):
        raise ValidationError(
            f"webhook_events must be one of {', '.join(EventFamily)}, beside a webhook_url, got {shown(family)}"
        )
    if url is None:
        return None
    family = EventFamily.REQUEST if family is None else EventFamily(family)
    return WebhookTarget(url=check_url(url), tenant=request.tenant, model=request.model, family=family)


def encode_target(target: WebhookTarget) -> str:
    """Return it as it goes with a request (as text: Redis's msgpack knows no bytes)."""
    return msgspec.json.encode(target).decode()
