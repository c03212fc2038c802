"""Writes the report of one run or several: one HTML file that needs no script and no other file."""
