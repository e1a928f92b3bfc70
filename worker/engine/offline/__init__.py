"""Runs an engine without a server on a workload file: ``python -m penstock.worker.engine.offline``."""
