"""Engines: how one replica turns requests into trajectories."""
