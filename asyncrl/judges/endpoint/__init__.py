"""A chat endpoint that votes."""
