"""The common part of producer and worker: messages, parameters, errors, Redis keys and the broker's scripts.

Nothing here imports torch, transformers or any other part of Penstock.
"""
