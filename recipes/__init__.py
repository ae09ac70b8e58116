"""The jobs: short, readable mains that put the parts together."""
