"""Measured rates of an engine and a trainer, and the devices, slots and batch that fit them."""
