"""Scalable Gaussian processes with nearest-neighbor structure, as Pyro models, guides and distributions."""
