"""Who may see whom, and the ways to compute it."""
