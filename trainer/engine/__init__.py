"""Holds parameters, and turns gradients into updates."""
