"""The largest eigenvalues of the Hessian of the loss, by layer."""
