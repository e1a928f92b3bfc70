"""Copies of KV blocks in host memory and in a folder, which are read back instead of computing their tokens again."""
