"""The judge: grades turns of live traffic by what followed their replies."""
