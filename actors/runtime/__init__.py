"""Code that all actors share: worker loop, keeper loop, context, dead letters, isolation."""
