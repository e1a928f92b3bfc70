"""`penstock metrics`: the figures of the whole deployment for Prometheus and autoscalers, while engines live or not."""
