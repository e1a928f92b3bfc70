"""Tools for people who change Penstock: measurements and checks that no deployment needs."""
