"""The referee: the engine alone and through Redis, the queue and its rivals, each on the same work in the same run."""
