"""Statistics of losses: the kernels, and a meter over them."""
