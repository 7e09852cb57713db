"""Cases on kernels, judged in processes that may die (`runner` asks, `service` answers there), by each oracle in turn."""
