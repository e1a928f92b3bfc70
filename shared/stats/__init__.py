"""What engines count and measure, as it travels."""
