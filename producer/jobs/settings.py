"""Settings of a process that runs jobs."""

from __future__ import annotations

import msgspec

from ...shared.errors import ConfigurationError
from ...shared.keys import Keys
from ...shared.tracing.endpoint import check_endpoint
from ...shared.values.names import DEFAULT_NAMESPACE
from ...shared.values.shown import MaskedRepr, shown
from ..background.agenda import LEASE_TTL_S
from ..client import RESULT_TTL_S
from ..webhooks.settings import WebhookSettings

# arq counts a job as lost after its timeout, so jobs return before that and continue as another run.
JOB_TIMEOUT_S = 300.0


class JobSettings(MaskedRepr, msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of jobs, validated on creation.

    Args:
        redis_url: as for ``Client``; of requests and jobs alike.
        namespace: prefix of all keys, the same as for the workers.
        shards: as for ``Client``.
        model: model of ``generate`` jobs that name none; may be omitted while exactly one model is known.
        tenant: tenant of ``generate`` jobs that name none.
        result_ttl_s: how long results of requests and of ``generate`` jobs can be read after their end.
        queue_name: arq's queue; ``NAMESPACE:jobs`` if empty. Jobs of two serializers must not share a queue.
        max_jobs: limit of concurrent jobs per process. They mostly wait.
        poll_delay_s: interval of polling the queue.
        sweep_every_s: interval of collecting due work: ended requests with a webhook, retries, and jobs of processes
            that died. Must divide 60.
        lease_ttl_s: how long after its process's death a job is claimed by another.
        drain_timeout_s: how long running jobs may take after SIGTERM before they are returned to the queue.
        health_check_interval_s: interval of the process's health reports.
        webhooks: how events are delivered.
        files_dir: folder of the files of batches; the default of ``BatchStore`` if None.
        otlp_traces_endpoint: where spans of requests are sent, by OTLP over HTTP. Needs the extra ``otel``.

    Raises:
        ConfigurationError: a value is out of range; the message names it.
    """

    redis_url: str
    namespace: str = DEFAULT_NAMESPACE
    model: str | None = None
    tenant: str = "default"
    result_ttl_s: float = RESULT_TTL_S
    queue_name: str = ""
    max_jobs: int = 100
    poll_delay_s: float = 0.2
    sweep_every_s: int = 1
    lease_ttl_s: float = LEASE_TTL_S
    drain_timeout_s: int = 10
    health_check_interval_s: float = 5.0
    webhooks: WebhookSettings = WebhookSettings()
    files_dir: str | None = None
    shards: str | None = None
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        positive = ("result_ttl_s", "poll_delay_s", "lease_ttl_s", "health_check_interval_s")
        for name, least in {**dict.fromkeys(positive, 0.01), "max_jobs": 2, "drain_timeout_s": 0}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e9:
                raise ConfigurationError(f"{name} must be at least {least}, got {shown(value)}")
        if self.sweep_every_s not in range(1, 61) or 60 % self.sweep_every_s:
            raise ConfigurationError(f"sweep_every_s must be a whole number that divides 60, got {self.sweep_every_s}")
        Keys(self.namespace)
        if self.otlp_traces_endpoint is not None:
            check_endpoint(self.otlp_traces_endpoint)

    @property
    def keys(self) -> Keys:
        return Keys(self.namespace)

    @property
    def queue(self) -> str:
        """Name of arq's queue."""
        return self.queue_name or self.keys.jobs()
