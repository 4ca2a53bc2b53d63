"""Learner: train on batches, publish weights, save checkpoints."""
