"""trainer check: reads what a run left and verifies the promises."""
