"""The state of a run, folded from its topics: views, diagnosis, histories."""
