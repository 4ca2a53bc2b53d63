"""The gateway: live traffic over HTTP, answered by the engines of the run."""
