"""The client's methods besides requests (engines, queues, models, text), and the operators' changes and keys."""
