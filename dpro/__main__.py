"""`python -m dpro` is the `dpro` command."""

from dpro.cli import main

if __name__ == "__main__":
    main()
