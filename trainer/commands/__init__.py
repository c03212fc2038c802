"""One file or folder for each command."""
