"""Tasks: prompts, rewards and demonstrations."""
