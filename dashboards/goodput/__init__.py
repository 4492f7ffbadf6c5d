"""The view of a job's life: what each rank did in all its time, over all attempts."""
