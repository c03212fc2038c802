"""Decides who runs where, before anything starts."""
