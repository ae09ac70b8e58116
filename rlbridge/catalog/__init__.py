"""Well-known models as shapes without weights, and how clusters shard them: what plans are predicted from."""
