"""Starts of unset hyperparameters from the data, so that nothing has to be standardized."""

__all__: list[str] = []
