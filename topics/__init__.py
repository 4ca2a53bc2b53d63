"""What is said: every message of a run, one file per noun."""
