"""The chaos campaign: a seed draws the faults of a run, a witness follows the run, and an audit judges it."""
