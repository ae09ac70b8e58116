"""``rlbridge plan``: what an update will cost on a cluster, from two layouts and a topology, before anything runs."""
