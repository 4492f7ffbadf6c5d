"""Which hosts were found at fault before: a small history of this user, over all runs."""
