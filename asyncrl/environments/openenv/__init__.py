"""The environment kind `openenv`."""
