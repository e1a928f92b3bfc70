"""The configurations of engine and worker process: a file for each group of options."""
