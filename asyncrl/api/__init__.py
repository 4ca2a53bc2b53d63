"""Python API: start, watch, change and stop runs from a program or a notebook."""
