"""Inference servers: the client, and an embedded one for CPUs."""
