"""Traces of trajectories for collectors of OpenTelemetry."""
