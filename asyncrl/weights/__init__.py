"""Versioned weights: manifests and stores."""
