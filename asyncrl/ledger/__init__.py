"""What the logs of a run prove and tell, as pure functions of messages."""
