"""Other people's clients against a tandem, each in an environment of its own: `python -m bench.clients`."""
