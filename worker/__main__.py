"""``python -m penstock.worker``: the program ``worker``, if the PATH has another program of that name."""

import sys

from .cli import main

sys.exit(main())
