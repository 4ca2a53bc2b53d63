"""Engines without a model, for benchmarks and tests."""
