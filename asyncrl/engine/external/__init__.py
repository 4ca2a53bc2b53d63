"""Servers with SGLang's API that their owner has started."""
