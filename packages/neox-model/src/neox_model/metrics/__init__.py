"""Numbers over time: measuring them and writing them."""
