"""Cases on kernels, judged in processes that may die of it: `runner` asks, `service` answers there, by all oracles."""
