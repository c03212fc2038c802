"""trainer doctor: checks this machine and says how to fix it."""
