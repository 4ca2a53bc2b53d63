"""Tools that the policy calls, one module for each kind of server."""
