"""Functions and data of users, in separate processes."""
