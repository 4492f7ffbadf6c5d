"""Who waits for whom when nothing moves any more: from what each rank last did to the ranks at fault."""
