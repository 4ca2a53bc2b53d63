"""Context parallelism: ranks share the tokens of each document, and gather its keys and values."""
