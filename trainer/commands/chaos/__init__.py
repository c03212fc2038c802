"""trainer chaos: injects faults into runs and compares the results with those of an unbroken run."""
