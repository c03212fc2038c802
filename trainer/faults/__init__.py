"""Problems, exit codes and failpoints."""
