"""What is wrong with a config: where, what was given, what to type instead."""
