"""Trainers: rows in, weights out."""
