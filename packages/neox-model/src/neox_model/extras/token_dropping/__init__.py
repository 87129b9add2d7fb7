"""Random layer-wise token dropping."""
