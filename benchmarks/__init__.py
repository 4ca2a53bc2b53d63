"""Benchmarks of asyncrl; `asyncrl bench` runs them from a source checkout."""
