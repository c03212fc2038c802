"""Runs tasks on several hosts, with a nursery on each, reached through a command such as ssh."""
