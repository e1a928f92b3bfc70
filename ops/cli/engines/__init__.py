"""Commands on engines, models and adapters."""
