"""Harnesses: programs that work on a task with the policy as their model, one module for each kind."""
