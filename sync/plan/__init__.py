"""Planning: from layouts and topology to one transfer program per worker. Pure."""
