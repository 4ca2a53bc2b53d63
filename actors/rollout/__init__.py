"""Rollout worker: execute the rollout function for each issued prompt."""
