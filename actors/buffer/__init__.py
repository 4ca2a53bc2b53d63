"""Buffer: pack graded groups into batches and decide how every trajectory ends."""
