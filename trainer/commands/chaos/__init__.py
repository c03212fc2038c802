"""trainer chaos: injects faults into runs and compares the results with an unbroken run's."""
