"""Shared by the launcher and the agents: the connection, its messages, run folders and signals."""
