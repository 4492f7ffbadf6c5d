"""Code that runs beside or inside the recorded job; it shares only the schema with the analysis."""
