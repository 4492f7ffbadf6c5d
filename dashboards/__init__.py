"""The web views. Nothing here yet: the terminal shows everything there is."""
