"""Layout discovery: which runtime element comes from which checkpoint element."""
