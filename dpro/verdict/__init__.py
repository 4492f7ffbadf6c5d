"""The verdict on a job: its limit, the part at fault, and what to do first; one document for all faces."""
