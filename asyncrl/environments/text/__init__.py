"""The environment kind `text`."""
