"""Where tokens come from: `http` speaks vLLM's routes to any server of them, `embedded` is our own such server."""
