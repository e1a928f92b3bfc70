"""The referee: one seeded workload, run on the engine alone and through Redis in the same run."""
