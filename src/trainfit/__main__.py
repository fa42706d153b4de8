"""python -m trainfit: the same as the trainfit command."""

from trainfit.cli.main import run

if __name__ == "__main__":
    run()
