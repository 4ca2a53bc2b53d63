"""Task data: prompts by number, tokenizer, chat templates."""
