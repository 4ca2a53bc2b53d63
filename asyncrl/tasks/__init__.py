"""Data, tokenisation, rollout functions and rewards."""
