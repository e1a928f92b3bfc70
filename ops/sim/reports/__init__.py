"""Reports of a simulation: figures, tables, plots."""
