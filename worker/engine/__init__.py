"""The engine core: schedules requests, runs the model, samples, and hands tokens over.

Read ``scheduler`` first, then ``core``, then ``process``. Importing this package or the scheduler loads no torch.
"""
