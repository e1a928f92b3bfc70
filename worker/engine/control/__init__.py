"""What an engine core does when it is asked: sleep, profiles, methods by name."""
