"""asyncrl: asynchronous reinforcement learning for language models, as actors that talk only through topics."""
