"""vLLM's engine core in process, behind our loop (decision 0074). All that knows vLLM's internals is here.

``options.py``, ``params.py``, ``outputs.py`` say what becomes what, and import nothing of vLLM: they are tested where
it is not. ``composition.py`` builds, ``warm_up.py`` and ``core.py`` run, ``control.py`` answers calls. ``versions.py``
says with which versions all that was tried. It runs in vLLM's interpreter, with the light ``penstock`` and vLLM's own
torch.
"""
