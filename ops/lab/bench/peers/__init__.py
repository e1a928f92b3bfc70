"""Scripts that run the workload on a rival, each in the rival's own environment: nothing of Penstock is imported."""
