"""Benches: modules to run from the repository, `python -m benches.first_call`; not installed."""
