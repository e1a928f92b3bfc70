"""Engine cores that are not ours, each behind ``worker.core``'s loop in an interpreter of its own choice."""
