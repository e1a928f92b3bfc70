"""The demo model: a small Llama trained for this project, on questions with answers that a program can check."""
