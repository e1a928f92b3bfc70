"""What there is of a deployment, as Redis knows it: engines, processes, their orders, who changed what."""
