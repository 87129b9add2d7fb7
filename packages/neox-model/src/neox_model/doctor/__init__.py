"""`python -m neox_model.doctor`: a worker that examines its host for `neox-launch doctor`."""
