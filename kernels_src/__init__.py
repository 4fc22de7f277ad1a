"""The shipped kernels: one folder an op, found by name; nothing else in the tree lists them."""
