"""Parts that kernels share: checks of arguments, strides of the cache's layouts, parts of device code."""
