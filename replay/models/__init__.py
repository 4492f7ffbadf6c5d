"""What parts of a job cost, by models that are fitted to it or published."""
