"""Several runs that differ in some values: which to try, in what order, and what came of each."""
