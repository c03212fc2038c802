"""Shards parameters over hosts: on parameter servers, or on the workers."""
