"""Judges of live turns: what followed a reply says how good it was."""
