"""The transformer's layers: plain arguments, groups passed in, hidden states with the sequence first."""
