"""Prompter: issue the prompts of a task, as far ahead as the lag allows."""
