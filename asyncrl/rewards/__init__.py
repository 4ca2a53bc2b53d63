"""Rewards: graders and the sandbox that user functions run in."""
