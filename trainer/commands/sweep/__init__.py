"""Sweeps: several runs that differ in some values, the order in which to try them, and the result of each."""
