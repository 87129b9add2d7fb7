"""The parameters by theme; each file is named for what reads it."""
