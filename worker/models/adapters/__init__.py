"""Low-rank adapters of a loaded model: PEFT folders, the linear layers they change, and slots in memory."""
