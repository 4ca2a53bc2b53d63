"""Engine: give one inference server the published weights."""
