"""``python -m penstock.ops.cli``: the program ``penstock`` where its script is not on the PATH."""

import sys

from . import main

sys.exit(main())
