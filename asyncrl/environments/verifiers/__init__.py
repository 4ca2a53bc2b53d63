"""The environment kind `verifiers`."""
