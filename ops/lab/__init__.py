"""Tools for people who change Penstock: measurements, trials, training and servers of tests. Not in the wheel."""
