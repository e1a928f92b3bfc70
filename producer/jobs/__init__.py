"""Jobs with arq: generations requested by an app's arq jobs, webhooks, and batches.

    from penstock.producer.jobs import JobSet, JobSettings

``JobSet`` has the parts of an arq worker's settings, for an app's own settings; ``penstock jobs`` runs them alone.
Needs the extra ``jobs``.
"""

from ...shared.values.distribution import install_command

try:
    # Imported here, to report a missing package with its remedy.
    import arq  # noqa: F401
    import httpx  # noqa: F401
    import standardwebhooks  # noqa: F401
except ImportError as error:
    raise ImportError(f"penstock.producer.jobs needs {error.name}: {install_command('jobs')}") from error

from .context import JobContext
from .job_set import JobSet, deserialize, serialize
from .settings import JobSettings, WebhookSettings

__all__ = ["JobContext", "JobSet", "JobSettings", "WebhookSettings", "deserialize", "serialize"]
