"""The environment kind `reasoning-gym`."""
