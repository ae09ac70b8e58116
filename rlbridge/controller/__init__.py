"""The controller: the one process the user started, and its dataflow."""
