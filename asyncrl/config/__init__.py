"""Configs: the settings of a run, how they are loaded, checked and documented, and the sizes they imply."""
