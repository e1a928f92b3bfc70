"""An engine alone on a workload file: ``python -m penstock.worker.engine.offline``."""
