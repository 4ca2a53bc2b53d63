"""The environment kind `harbor`."""
