"""The worker process: claims waves, converts text and tokens, publishes, sends heartbeats. asyncio, no torch."""
