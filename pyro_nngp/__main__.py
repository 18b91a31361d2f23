"""``python -m pyro_nngp``: the command line."""

from pyro_nngp.adapters.command_line import run

if __name__ == "__main__":
    run()
