"""Which rows of several ranks are one collective, and how far their clocks are apart."""
