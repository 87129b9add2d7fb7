"""What there is to run on: this host's devices, and hosts and slots as a world of ranks."""
