"""What runs beside or inside the recorded job. It meets the analysis only at the schema."""
