"""Rows of metrics as a run of Trackio."""
