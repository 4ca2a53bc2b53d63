"""The HTTP APIs of the gateway: each parses request bodies and renders replies, without I/O."""
