"""The keeper of sessions: which turns of live traffic are judged and trained, and when a session ends."""
