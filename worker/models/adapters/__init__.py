"""Low-rank adapters of a loaded model: PEFT folders, the linear layers that take them, slots beside the weights."""
