"""The run's own model, which votes."""
