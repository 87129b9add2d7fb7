"""Log-likelihoods of texts under a model, and what follows from them: perplexity, and results of tasks."""
