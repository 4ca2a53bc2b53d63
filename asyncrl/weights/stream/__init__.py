"""The weight store `stream`: versions on the NATS server, for hosts that share no folder."""
