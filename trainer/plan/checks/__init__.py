"""Validates rules between the keys of a config, and between a config and a machine."""
