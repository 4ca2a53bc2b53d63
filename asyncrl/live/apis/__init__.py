"""The HTTP APIs of the gateway: each parses request bodies and renders replies; none of them does I/O."""
