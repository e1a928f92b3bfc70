"""A Redis cluster, Redis with Sentinels and a Ray cluster on this machine."""
