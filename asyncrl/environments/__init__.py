"""Environments: named tasks, each of which makes rows and scores answers to them."""
