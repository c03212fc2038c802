"""Where parameters live and gradients meet."""
