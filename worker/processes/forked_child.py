"""Run a function in a forked child instead of the parent's code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


def be_child(work: Callable[[], int]) -> NoReturn:
    """Run ``work`` and exit with the status that it returns or exits with; with 1 and a traceback if it raises.

    The parent's frames and exit handlers do not run in the child.
    """
    status = 1
    try:
        status = work()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
