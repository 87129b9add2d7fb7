"""Load a checked configuration from YAML files and command-line options."""
