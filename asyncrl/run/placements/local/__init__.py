"""Placement on this machine."""
