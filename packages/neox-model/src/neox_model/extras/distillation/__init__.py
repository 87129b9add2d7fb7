"""Training with the logits and hidden states of a teacher."""
