"""Live traffic: the HTTP APIs that people and agents call, and the tokens of their conversations."""
