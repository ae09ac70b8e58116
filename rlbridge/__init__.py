"""rlbridge: asynchronous RL post-training for language models whose weights never wait."""

__version__ = "0.1.0"
