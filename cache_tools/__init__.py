"""Tools that work on a cache directory."""
