"""Tracking: metrics.jsonl, wandb, progress in the terminal, traces, the summary."""
