"""``python -m penstock.worker.serving``: started by the supervisor."""

import sys

from ...shared.process import plain_structlog  # noqa: F401  # before structlog
from .process import main

sys.exit(main())
