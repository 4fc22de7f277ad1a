"""Benches: each is a module to run from the repository, `python -m benches.first_call`; none is installed."""
