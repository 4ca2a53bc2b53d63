"""Group reward worker: grade the members of a group together."""
