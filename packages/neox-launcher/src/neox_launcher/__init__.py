"""Start training jobs on one host or many: plans, backends, supervision, restarts. Torch-free."""
