"""Reward worker: grade trajectories."""
