"""The simulator beside what it simulates: scenarios in real time and by real engines, and fits to recorded steps."""
