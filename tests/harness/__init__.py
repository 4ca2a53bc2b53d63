"""Parts that tests share: runs, actors in process, made-up messages, servers."""
