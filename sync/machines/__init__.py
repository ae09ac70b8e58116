"""The protocol of an update as state machines without I/O: events in, instructions out.

The shells (``sync.coordinator``, ``sync.member``) carry messages, run programs and keep time; every decision is here.
"""
