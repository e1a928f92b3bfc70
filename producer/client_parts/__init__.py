"""The parts of ``Client`` for requests, and the base class of all its parts."""
