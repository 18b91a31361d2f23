"""A guide for programs with nearest-neighbor Gaussian processes, coefficients and group effects."""
