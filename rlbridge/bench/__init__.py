"""Side-by-side measurements of weight transfers between real processes: ``rlbridge bench``."""
