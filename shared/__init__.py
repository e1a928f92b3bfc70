"""What both sides of the stream share: messages, parameters, errors, Redis keys and the broker's scripts.

Nothing here imports torch, transformers or any other part of Penstock.
"""
