"""One update in every precision on every layout, and plain autograd: `make sweep NAME=precision`."""
