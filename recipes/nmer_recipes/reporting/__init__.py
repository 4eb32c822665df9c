"""Turns run directories into tables and figures for the command `recipes/report.py`."""
