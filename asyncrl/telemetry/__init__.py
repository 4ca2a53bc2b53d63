"""Structured logs and plots."""
