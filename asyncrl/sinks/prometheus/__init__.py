"""The newest figures of a run, for Prometheus."""
