"""Searches and bounds behind ``multi_axis`` and ``redistributors``, on plain tuples and integers."""
