"""The trainer `torch`, on models of transformers."""
