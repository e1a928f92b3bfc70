"""Cost of adapters: requests without any, all with one, and each with one of eight."""
