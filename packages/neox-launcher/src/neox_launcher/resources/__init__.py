"""The resources of a job: hosts, slots and devices, in the order of ranks."""
