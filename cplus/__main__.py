"""`python -m cplus`: the command line, where its script is not on the path."""

from cplus.cli import main

if __name__ == "__main__":
    main()
