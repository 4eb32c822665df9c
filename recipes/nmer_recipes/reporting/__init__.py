"""From run directories to tables and figures; `recipes/report.py` is the command."""
