"""The engine of DeepSpeed: all that imports it."""
