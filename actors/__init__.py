"""Who says it: one file per actor over two shared loops, worker.py and keeper.py."""
