"""All tests and measurements on a GPU in one command: ``make gpu-check``.

The parts run one after the other in their own processes, each with a time limit. A part that fails, crashes the device
or hangs loses only its own rows. Results are written after every part.

This package imports only the standard library, because a machine may have torch and Triton but lack the engine's
dependencies. Then the kernels are measured, and the engine's rows name the missing packages.
"""
