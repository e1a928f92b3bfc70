"""I/O processors: what turns data of other kinds into prompts for a model that pools, and its results into answers."""

from .interface import IOProcessor
from .registry import IOProcessors, NamedProcessor

__all__ = ["IOProcessor", "IOProcessors", "NamedProcessor"]
