"""Warnings of data that a model accepts, but that are hardly meant: units, codes, copies and near duplicates."""

__all__: list[str] = []
