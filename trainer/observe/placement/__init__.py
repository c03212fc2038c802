"""Compares where each operation ran with the plan."""
