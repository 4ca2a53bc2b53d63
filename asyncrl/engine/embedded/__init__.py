"""An inference engine for small models on one CPU core, with SGLang's HTTP API."""
