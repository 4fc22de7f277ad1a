"""The version of jitkern."""

__version__ = "0.1.0"
