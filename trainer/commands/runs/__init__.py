"""Commands about runs that have been started: list, inspect and steer them."""
