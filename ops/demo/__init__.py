"""The demo model: a small Llama trained here, on questions whose answers a program can check."""
