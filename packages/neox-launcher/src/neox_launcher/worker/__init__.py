"""The launcher's part of a worker process: its setup before the program starts, and its reports."""
