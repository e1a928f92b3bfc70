"""`penstock metrics`: metrics of the whole deployment for Prometheus and autoscalers, also while no engine runs."""
