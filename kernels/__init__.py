"""Kernels of the engine: a folder each, with a documented wrapper and a reference in plain torch.

Axis letters, here and in the engine: ``T`` tokens, ``B`` requests, ``H`` query heads, ``KVH`` key/value heads,
``D`` head dim, ``V`` vocabulary, ``NB`` blocks, ``BS`` block size.
"""
