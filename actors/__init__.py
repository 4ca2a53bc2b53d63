"""The actors of a run: one folder per role; their shared code is in `runtime`."""
