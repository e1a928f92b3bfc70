"""``python -m penstock.worker.models.survey``, which is ``penstock.worker.survey`` now."""

import runpy

runpy.run_module("penstock.worker.survey", run_name="__main__", alter_sys=True)
