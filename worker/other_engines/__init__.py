"""Cores of other engines. Each runs in the loop of ``worker.core``, and may use a separate Python interpreter."""
