"""`python -m splitserve` is the command `splitserve`."""

from splitserve.cli.main import run

if __name__ == "__main__":
    run()
