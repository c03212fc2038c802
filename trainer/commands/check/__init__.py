"""trainer check: verifies the promises for a run from the files that it left."""
