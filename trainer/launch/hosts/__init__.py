"""Tasks on several hosts: a nursery on each, reached through a command such as ssh."""
