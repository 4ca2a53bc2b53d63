"""The actors of a run: one folder per role; what they share is in `runtime`."""
