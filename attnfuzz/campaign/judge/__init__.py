"""How a case gets a verdict in a worker, and whether that verdict comes back."""
