"""The bridge: what goes where, how it moves, and when. Imports neither Hydra nor wandb, and no trainer or engine."""
