"""Decisions and checks when an engine is built: threads, kernels, cache pages, stages, unsupported options."""
