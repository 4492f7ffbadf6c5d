"""How long steps take, which of them are pauses, and where their time went: from tables alone."""
