"""The engine core as its worker process has it: started, spoken to, watched, and its end judged."""
