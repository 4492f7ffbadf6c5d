"""Whole operations of pipeline-parallel jobs, as traced by their framework or found in recordings."""
