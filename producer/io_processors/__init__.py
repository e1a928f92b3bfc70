"""I/O processors: convert other kinds of data to prompts for a pooling model, and its results to answers."""

from .interface import IOProcessor
from .registry import IOProcessors, NamedProcessor

__all__ = ["IOProcessor", "IOProcessors", "NamedProcessor"]
