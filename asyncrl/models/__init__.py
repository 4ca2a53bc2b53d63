"""Models that asyncrl fetches: known names, the hub, local directories and GGUF files."""
