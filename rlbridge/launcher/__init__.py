"""Launchers: how worker processes come to life and are reaped."""
