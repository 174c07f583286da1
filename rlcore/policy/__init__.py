"""The policy in training: packed batches of rollouts, log-probabilities, the objective."""
