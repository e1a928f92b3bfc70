"""Everything that a GPU can tell, in one command: ``make gpu-check``.

The parts run one after the other in processes of their own, each with a time limit: one that fails, crashes the device
or hangs costs its own rows alone. What is found is written after every part.

Nothing here imports more than the standard library, for a machine may have torch and Triton, and lack what an engine
needs: then the kernels are measured, and the engine's rows say what is missing.
"""
