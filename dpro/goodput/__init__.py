"""Where all the time of a job went, over all its attempts, and what another way of recovery would give."""
