"""Rows of metrics as events of TensorBoard."""
