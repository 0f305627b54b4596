"""`python -m planc` is the command line."""

from planc.cli import main

main()
