"""Moving bytes between workers. Knows nothing of weights, layouts or RL."""
