"""vLLM servers, started by the run or by their owner."""
