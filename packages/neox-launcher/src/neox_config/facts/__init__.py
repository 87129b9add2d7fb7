"""Facts shared by the configuration and the implementations."""
