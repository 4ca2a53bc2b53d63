"""The audit: nothing lost, nothing trained twice, every end accounted for."""
