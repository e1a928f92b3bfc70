"""Data parallelism over shared experts: engines that are ranks of one group and step together.

The reasons are in ops/decisions/data_parallel.md.

``member`` holds the rank in the worker process and ``wave`` decides when a rank steps; neither imports torch.
``composition`` builds the core of a rank from the other modules.
"""
