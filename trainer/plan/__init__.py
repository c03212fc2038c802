"""Who runs where, decided before anything starts."""
