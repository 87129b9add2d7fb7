"""Sample index: which tokens belong to which training sample, and its files."""
