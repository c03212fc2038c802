"""Where the time of each step went."""
