"""The parts that every route needs, in one place."""

from __future__ import annotations

import msgspec

from ...shared.connection import CommandConnection
from .. import Client
from ..batches import BatchStore
from ..openai.parsers import ModelParsers
from ..openai.responses.service import Responses
from .auth import Authenticator
from .metrics import Metrics
from .settings import GatewaySettings


class Gateway(msgspec.Struct, frozen=True):
    """A running gateway: made by ``app.build_app`` when it starts, found by routes with ``of(request)``."""

    settings: GatewaySettings
    client: Client
    authenticator: Authenticator
    metrics: Metrics
    parsers: ModelParsers
    responses: Responses
    batches: BatchStore
    connection: CommandConnection
