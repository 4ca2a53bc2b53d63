"""Recorder: write metrics files from the logs."""
