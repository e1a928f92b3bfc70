"""Adapters of an engine: loaded beside the step loop, kept in host memory, in slots while requests run with them."""
