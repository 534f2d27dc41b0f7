"""Trains the models that decoding_jax decodes: `python -m train --config=... --workdir=...`."""
