"""Optimisation: models, advantages, losses, checkpoints. Knows nothing of engines."""
