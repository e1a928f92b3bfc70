"""``python -m penstock.worker.serving``: started by the supervisor."""

import sys

from .process import main

sys.exit(main())
