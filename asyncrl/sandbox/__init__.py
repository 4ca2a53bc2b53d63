"""Functions of users, and data of theirs, in processes of their own."""
