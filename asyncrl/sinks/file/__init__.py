"""Rows of metrics as lines of JSON in a file."""
