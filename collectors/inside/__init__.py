"""What runs inside the job: the standard library and torch only, and nothing that can raise into it.

The package is loaded from its files under an alias, so that the job's environment need not have dpro, and so
that no name of it is in the job's way; its modules therefore import each other relatively.
"""
