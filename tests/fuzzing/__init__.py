"""Documents that nobody would write, given to the parser: `make fuzz`, and a few hundred of them in `make test`."""
