"""`python -m redcoast_cli`, which is the command `redcoast`."""

from redcoast_cli import main

if __name__ == "__main__":
    main()
