"""Commands that start a job or look into one: record, attach, watch, try, and what goes with them."""
