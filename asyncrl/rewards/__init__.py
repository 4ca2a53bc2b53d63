"""Rewards: graders, and the child processes that run user functions."""
