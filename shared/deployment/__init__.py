"""The deployment as Redis knows it: engines, processes, their orders, and the record of changes."""
