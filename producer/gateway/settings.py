"""What can be set of a gateway."""

from __future__ import annotations

import math

import msgspec

from ...shared.errors import ConfigurationError
from ...shared.names import DEFAULT_NAMESPACE, check_name
from ...shared.urls import MaskedRepr
from ..client import RESULT_TTL_S
from ..openai.parsers import ParserChoice
from ..web.connection import KEEP_ALIVE_TIMEOUT_S
from ..web.request_body import REQUEST_TIMEOUT_S
from ..webhooks.addresses import Networks
from .access.cors import ANY, origin_pattern

DEFAULT_PORT = 8000
MAX_BODY_BYTES = 4 * 1024 * 1024


class GatewaySettings(MaskedRepr, msgspec.Struct, frozen=True, kw_only=True):
    """Checked when it is made.

    Args:
        redis_url, namespace, shards: the deployment, as of ``Client``.
        model: of requests that name none; needed only where several are served.
        tenant: of requests while ``api_keys`` is False.
        api_keys: whether requests need a key of ``penstock keys``.
        max_body_bytes: of one request.
        max_running_requests: more at a time are answered with 429; the queue behind has limits of its own.
        result_ttl_s: how long an answer can be read again, which a response of the Responses API is all the time.
        reconnect_grace_s: how long a cut stream's request goes on for somebody to pick it up; 0 cancels it at once.
        lease_ttl_s: the same where this process died.
        shutdown_timeout_s: how long running answers may take to end after SIGTERM.
        keep_alive_timeout_s: how long a connection may be idle between two requests before it is closed.
        request_timeout_s: how long the head of a request may take, and then its body; a body gets a second more for
            each 8 KiB that has come.
        keep_alive_s: a stream that is silent for so long sends a comment, so that no proxy closes it.
        status_wait_s: how long the status of a stream waits for its first event or a refusal; what goes wrong later is
            told by an event.
        cors_origins: which pages may call from a browser, by origins and patterns (see ``cors``); none turns CORS off.
        parsers: what reads tool calls and reasoning in answers to chats.
        lora_updating: whether adapters are named and removed over HTTP: those of the key's tenant, or without keys
            everybody's.
        fail_fast: answer 503 at once while no engine serves the model, instead of waiting for one.
        deployment_metrics: whether /metrics tells of queues and engines, too. Only one process of a deployment should:
            sums over several would count all of it several times.
        files_dir: where uploaded files and the answers of batches are; PENSTOCK_FILES_DIR, or "files" in the user's
            data folder, when None. All hosts that serve or run them share it.
        fetch_images: whether images that a body names by https are fetched; else only data URLs are taken.
        io_processors: what turns ``data`` of bodies of /pooling into prompts, as ``Client`` names them.
        image_networks: private networks (CIDR) that may be asked for images, too; "all" for every address.
        otlp_traces_endpoint: where spans of requests are sent, by OTLP over HTTP. Extra ``penstock[otel]``.

    Raises:
        ConfigurationError: a value is wrong; the message names it.
    """

    redis_url: str
    namespace: str = DEFAULT_NAMESPACE
    model: str | None = None
    tenant: str = "default"
    api_keys: bool = False
    max_body_bytes: int = MAX_BODY_BYTES
    max_running_requests: int = 10_000
    result_ttl_s: float = RESULT_TTL_S
    reconnect_grace_s: float = 5.0
    lease_ttl_s: float = 10.0
    shutdown_timeout_s: float = 30.0
    keep_alive_timeout_s: float = KEEP_ALIVE_TIMEOUT_S
    request_timeout_s: float = REQUEST_TIMEOUT_S
    keep_alive_s: float = 15.0
    status_wait_s: float = 2.0
    cors_origins: tuple[str, ...] = ()
    parsers: ParserChoice = ParserChoice()
    lora_updating: bool = False
    fail_fast: bool = False
    files_dir: str | None = None
    shards: str | None = None
    deployment_metrics: bool = False
    otlp_traces_endpoint: str | None = None
    fetch_images: bool = False
    image_networks: tuple[str, ...] = ()
    io_processors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("namespace", self.namespace), ("tenant", self.tenant)):
            check_name(name, value)
        for name, lowest in (("max_body_bytes", 1024), ("max_running_requests", 1)):
            if getattr(self, name) < lowest:
                raise ConfigurationError(f"{name} must be at least {lowest}, got {getattr(self, name)}")
        for name in ("reconnect_grace_s", "shutdown_timeout_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name} must be a number of seconds, at least 0, got {getattr(self, name)}")
        for name in (
            "lease_ttl_s",
            "keep_alive_timeout_s",
            "request_timeout_s",
            "keep_alive_s",
            "status_wait_s",
            "result_ttl_s",
        ):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name} must be a positive number of seconds, got {getattr(self, name)}")
        Networks(self.image_networks)
        for origin in self.cors_origins:
            if origin != ANY:
                origin_pattern(origin)
