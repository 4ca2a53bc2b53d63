"""Sandboxes: places in which programs work on a task, one module for each kind."""
