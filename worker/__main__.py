"""``python -m penstock.worker``: the program ``worker``, whose name may be another's on somebody's PATH."""

import sys

from .cli import main

sys.exit(main())
