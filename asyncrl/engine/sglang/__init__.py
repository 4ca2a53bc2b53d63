"""SGLang servers that the run starts."""
