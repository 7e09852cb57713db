"""Cases on kernels, judged in processes that may die of it (`runner` asks, `service` answers), by each oracle in turn."""
