"""Files that were read become one run."""
