"""Commands on keys and secrets: who may what, and who did what."""
