"""Steps as CUDA graphs: one launch in the place of hundreds."""
