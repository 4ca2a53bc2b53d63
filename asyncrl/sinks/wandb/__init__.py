"""Rows of metrics as a run of Weights & Biases."""
