"""Commands about runs that have been started: list them, look at them, and steer them."""
