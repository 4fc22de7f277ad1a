"""The launch function as C: what it reads, the run that notes what it does, the text of a stub."""
