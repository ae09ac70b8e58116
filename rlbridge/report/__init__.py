"""``rlbridge report``: runs as one self-contained HTML page.

``reading`` is the only I/O on the way in; everything between it and ``command``, which writes the page, is pure.
"""
