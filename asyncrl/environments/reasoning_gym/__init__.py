"""Datasets of the reasoning-gym package."""
