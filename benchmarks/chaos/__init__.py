"""The chaos campaign: a run under faults that a seed draws, followed by a witness, and judged by its topics."""
