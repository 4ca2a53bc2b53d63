"""An inference engine for small models on one CPU core, behind SGLang's HTTP API."""
