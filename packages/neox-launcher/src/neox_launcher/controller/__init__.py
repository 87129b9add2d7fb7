"""The launch host: starts agents, supervises them, restarts them."""
