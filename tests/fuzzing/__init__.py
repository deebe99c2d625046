"""Documents that nobody would write, given to the parser: `python -m bench fuzz`, and a few hundred of them in `make test`."""
