"""Decisions and checks when an engine is built: threads, kernels, cache pages, unsupported options, the layout."""
