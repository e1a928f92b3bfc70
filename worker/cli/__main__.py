"""``python -m penstock.worker.cli``: the program ``worker`` where its script is not on the PATH."""

import sys

from . import main

sys.exit(main())
