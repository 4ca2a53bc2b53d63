"""The trainer `scripted`, for benchmarks and tests."""
