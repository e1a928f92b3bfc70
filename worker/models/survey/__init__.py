"""The name that ``worker/survey`` had up to 0.1, for ``python -m penstock.worker.models.survey``."""
