"""What every engine core is behind the socket of its worker process, whatever computes: the loop, and what it needs."""
