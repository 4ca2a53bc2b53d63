"""Supervisor: start, watch, restart and scale the actors; trim streams; find stalls."""
