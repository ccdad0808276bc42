"""`python -m attnc.cli`: the command where its script is not on the path."""

from attnc.cli import main

main()
