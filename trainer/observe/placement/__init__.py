"""Where each operation ran, compared with the plan."""
