"""C in this process: what Torch calls for an op, and the builds that make it fast."""
