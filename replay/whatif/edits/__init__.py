"""Edits, one module per family; `dpro.replay.whatif.registry` lists them."""
