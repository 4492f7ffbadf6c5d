"""What a job would get done if it saved, failed and restarted in another way."""
