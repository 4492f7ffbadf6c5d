"""Whole operations of pipeline-parallel jobs: as their framework traces them, or as they were recorded."""
