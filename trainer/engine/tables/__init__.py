"""Tables: their rows stay on the hosts, and a step reads and updates only those that it touches."""
