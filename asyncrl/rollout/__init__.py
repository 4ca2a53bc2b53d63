"""Rollout functions: the context they get, and the journal that lets another worker resume them."""
