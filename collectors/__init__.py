"""What runs beside or inside the job: launcher, injection, recorders. Meets the analysis only at the schema."""
