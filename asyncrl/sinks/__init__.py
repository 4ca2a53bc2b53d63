"""Sinks: tools that show the metrics of a run. One folder for each kind."""
