"""A rule over words, or a function of the user."""
