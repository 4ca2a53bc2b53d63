"""Why a run does not come further: a picture of it from its topics, and what the picture means."""
