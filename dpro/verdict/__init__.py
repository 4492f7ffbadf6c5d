"""What limits a job, who is at fault, and what to do first: one document that every face of dpro prints."""
