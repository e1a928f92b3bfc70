"""Keeps Python's garbage collector away from what never becomes garbage."""

from __future__ import annotations

import atexit
import gc


def freeze_loaded_objects() -> None:
    """Have later collections pass over every object there is now; to be called once an engine is built.

    torch, transformers and a model are 380,000 objects. A full collection looked at each of them and held up a step by
    240 ms; what requests leave behind it looks through in less than one.
    """
    # First, or what loading has left behind, weights perhaps, would stay for good.
    gc.collect()
    gc.freeze()
    # Else the libraries that count their objects at the end of the process find these and report them as leaked.
    atexit.register(gc.unfreeze)
