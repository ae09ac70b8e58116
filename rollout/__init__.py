"""Generation: engines, trajectories, tasks and rewards. Knows nothing of losses."""
