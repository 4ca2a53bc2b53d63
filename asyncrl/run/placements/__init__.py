"""The kinds of placements; one folder each."""
