"""Adapters of an engine: loaded by a thread, kept in host memory, and in device slots while requests run with them."""
