"""What a simulation reports, and how: figures, tables, plots."""
