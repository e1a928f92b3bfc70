"""vLLM's engine core in the loop of ``worker.core``. Only this package uses vLLM's internals.

The reasons are in ops/decisions/other_engines.md.

``options.py`` and ``conversion.py`` convert values and do not import vLLM, so they are tested without it.
``composition.py`` builds the core, ``warm_up.py`` and ``core.py`` run it, and ``control.py`` answers calls.
``versions.py`` has the supported versions. The core runs in vLLM's interpreter, with the light ``penstock`` and vLLM's
torch.
"""
