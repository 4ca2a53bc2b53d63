"""Evaluator: answer the prompts of an evaluation."""
