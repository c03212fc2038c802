"""Finds the problems of a config: where, what was typed, and what to type instead."""
