"""The worker process: claims waves, does the text work, publishes, beats its heart. asyncio, no torch."""
