"""The router actor."""
