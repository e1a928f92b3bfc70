"""Control calls as a worker process answers them."""
