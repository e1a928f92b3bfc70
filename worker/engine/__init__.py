"""Penstock's engine: schedules requests, runs the model, samples, and returns tokens.

Read ``scheduling/scheduler.py`` first, then ``core/engine_core.py``. Neither imports torch.
"""
