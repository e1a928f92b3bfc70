"""Jobs with arq: generations that an app's own arq jobs ask for, webhooks, batches.

    from penstock.producer.jobs import JobSet, JobSettings

``JobSet`` has the parts of an arq worker's settings, to be put into an app's own; ``penstock jobs`` runs them alone.
Needs the extra ``jobs``.
"""

try:
    import arq  # noqa: F401  # told here, where the remedy can be said
except ImportError as error:
    raise ImportError("penstock.producer.jobs needs arq: pip install 'penstock[jobs]'") from error

from .context import JobContext
from .job_set import JobSet
from .serializer import deserialize, serialize
from .settings import JobSettings

__all__ = ["JobContext", "JobSet", "JobSettings", "deserialize", "serialize"]
