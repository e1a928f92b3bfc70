"""Where and how weights are stored: the device, and linear layers packed, quantized or adapted."""
