"""A run on this machine: its directory, pre-flight checks, processes and connections."""
