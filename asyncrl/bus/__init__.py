"""NATS: connect, provision, publish, pull, fold, blobs, embedded server."""
