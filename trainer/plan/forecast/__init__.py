"""How long a step will take."""
