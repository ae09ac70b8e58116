"""``rlbridge layout``: which runtime tensor comes from which part of the checkpoint, as a table a person can read."""
