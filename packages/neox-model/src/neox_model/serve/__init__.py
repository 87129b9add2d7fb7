"""Text from a trained model over HTTP, compatible with OpenAI's API: `python -m neox_model.serve`."""
