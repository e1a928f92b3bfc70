"""What a child that was forked does in the place of its parent's work."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


def be_child(work: Callable[[], int]) -> NoReturn:
    """Do ``work`` and end with the status that it returns or exits with; with 1, and a traceback, if it raises.

    Whatever the parent's own frames and exit handlers would do is not the child's to do.
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
