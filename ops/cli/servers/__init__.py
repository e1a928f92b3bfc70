"""Commands that run a server until it is stopped."""
