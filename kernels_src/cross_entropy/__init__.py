"""Cross-entropy: the kernels, and a loss whose gradient takes the place of the logits."""
