"""The topics: every message of a run, one file per noun."""
