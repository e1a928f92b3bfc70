"""The parts that every route needs, in one place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from ...shared.connection import CommandConnection
from .. import Client
from ..batches import BatchStore
from ..io_processors import IOProcessors
from ..openai.parsers import ModelParsers
from ..openai.responses.service import Responses
from .access.auth import Authenticator
from .bodies.images import ImageFetcher
from .figures import Family
from .metrics import Metrics
from .settings import GatewaySettings


class Gateway(msgspec.Struct, frozen=True):
    """A running gateway: made by ``app.build_app`` when it starts, found by routes with ``of(request)``.

    Args:
        metrics: of this process.
        read_figures: what the whole gateway has counted, of however many processes it consists.
    """

    settings: GatewaySettings
    client: Client
    authenticator: Authenticator
    metrics: Metrics
    read_figures: Callable[[], Awaitable[list[Family]]]
    parsers: ModelParsers
    responses: Responses
    batches: BatchStore
    connection: CommandConnection
    images: ImageFetcher
    io_processors: IOProcessors
