"""Settings of the gateway."""

from __future__ import annotations

import math

import msgspec

from ...shared.errors import ConfigurationError
from ...shared.values.names import DEFAULT_NAMESPACE, check_name
from ...shared.values.shown import MaskedRepr
from ..client import RESULT_TTL_S
from ..control.usage import Prices
from ..openai.parsers import ParserChoice
from ..web.connection import KEEP_ALIVE_TIMEOUT_S, REQUEST_TIMEOUT_S
from ..webhooks.addresses import Networks
from .cors import ANY, origin_pattern

DEFAULT_PORT = 8000
MAX_BODY_BYTES = 4 * 1024 * 1024


class GatewaySettings(MaskedRepr, msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the gateway, validated on creation.

    Args:
        redis_url, namespace, shards: the deployment, as for ``Client``.
        model: model of requests that name none; needed only if several are served.
        tenant: tenant of all requests while ``api_keys`` is False.
        api_keys: whether requests need a key created by ``penstock keys``.
        max_body_bytes: limit of one request's body.
        max_running_requests: limit of concurrent requests; further ones get 429. The queue has separate limits.
        result_ttl_s: how long an answer can be read again; a response of the Responses API is stored as long.
        reconnect_grace_s: how long the request of a cut stream keeps running so that its client can resume it; 0
            cancels it immediately.
        lease_ttl_s: the same for a stream whose gateway process died.
        shutdown_timeout_s: how long running answers may take to end after SIGTERM.
        keep_alive_timeout_s: how long a connection may be idle between two requests before it is closed.
        request_timeout_s: time limit of a request's head, and then of its body; a body gets one more second for each 8
            KiB received.
        keep_alive_s: a stream without events for this long sends a comment, so that no proxy closes it.
        status_wait_s: how long the status of a stream waits for its first event or a refusal; later failures are
            reported by an event.
        cors_origins: web pages that may call from a browser, as origins and patterns (see ``cors``); empty turns CORS
            off.
        parsers: parsers of tool calls and reasoning in chat answers.
        lora_updating: whether adapters can be added and removed over HTTP: for the key's tenant, or for everybody
            without API keys.
        fail_fast: answer 503 immediately while no engine serves the model, instead of waiting for one.
        deployment_metrics: whether /metrics includes queues and engines. Enable it in one gateway of a deployment only,
            since sums over several would count them several times.
        files_dir: folder of uploaded files and batch output; if None, PENSTOCK_FILES_DIR, or "files" in the user's data
            folder. All hosts that serve or run batches share it.
        fetch_images: whether https URLs of images in a body are fetched; otherwise only data URLs are accepted.
        io_processors: names of I/O processors that turn ``data`` of /pooling bodies into prompts, as for ``Client``.
        strict_fields: refuse bodies with fields that have no effect, instead of ignoring and naming the fields.
        image_networks: private networks (CIDR) from which images may be fetched too; "all" for every address.
        prices: prices of models, for the costs of /v1/usage; None for none.
        otlp_traces_endpoint: where spans of requests are sent, by OTLP over HTTP. Needs the extra ``otel``.

    Raises:
        ConfigurationError: a value is invalid; the message names it.
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
    strict_fields: bool = False
    prices: Prices | None = None

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
