"""Moving sealed blocks between two KV pools: loopback, shm, tcp, ucx behind one interface."""
