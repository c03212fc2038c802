"""Tables: rows that stay on the hosts, and of which a step reads and updates only those that it touches."""
