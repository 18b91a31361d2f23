"""Where the regression sets of the UCI repository are, what their files must hash to, and how they are read.

Only plain-text files are listed. Each checksum has been published by at least two unrelated projects for the same file.
"""

from typing import NamedTuple

import numpy as np

_LEGACY = "https://archive.ics.uci.edu/ml/machine-learning-databases"
_CURRENT = "https://archive.ics.uci.edu/static/public"


class Source(NamedTuple):
    """One text file of numbers: its address, checksum, column delimiter (None: white space) and target columns."""

    url: str
    sha256: str
    delimiter: str | None = None
    has_header: bool = False
    targets: tuple[int, ...] = (-1,)


SOURCES = {
    "airfoil": Source(
        f"{_LEGACY}/00291/airfoil_self_noise.dat",
        "74c75fd71783f1e6b71f8a622b993dc592897a97cd689c5090a07147a1b097b3",
    ),
    "boston": Source(
        f"{_LEGACY}/housing/housing.data",
        "baadf72995725d76efe787b664e1f083388c79ba21ef9a7990d87f774184735a",
    ),
    "concrete": Source(
        f"{_CURRENT}/165/data.csv",
        "8d4b15b6fc68cd932d745cbd663d5ceae66dd54422e99c1e4865f2936ab7e2af",
        delimiter=",",
        has_header=True,
    ),
    "energy": Source(
        f"{_CURRENT}/242/data.csv",
        "db44dbe453acd464b5cf65be2fb01a28aa9c5b2630300e65fbe28cde35f5d96f",
        delimiter=",",
        has_header=True,
        targets=(-2, -1),
    ),
    "power_plant": Source(
        f"{_CURRENT}/294/data.csv",
        "3c1fc11025f8424f8d95802d8b7086dffd3f73a552c6dcab3d973620986194b2",
        delimiter=",",
        has_header=True,
    ),
    "protein": Source(
        f"{_LEGACY}/00265/CASP.csv",
        "4277cfcb4e91a181746cbc654f001b57951c9e6a80f4f795fdb5c807e0848f40",
        delimiter=",",
        has_header=True,
        targets=(0,),
    ),
    "wine": Source(
        f"{_LEGACY}/wine-quality/winequality-red.csv",
        "4a402cf041b025d4566d954c3b9ba8635a3a8a01e039005d97d6a710278cf05e",
        delimiter=";",
        has_header=True,
    ),
    "yacht": Source(
        f"{_LEGACY}/00243/yacht_hydrodynamics.data",
        "00dfecc0fc01ddd4c90b558a3ac11b246df8ebcfea130724223475a9a67f0ea1",
    ),
}


def read(path: str, source: Source) -> tuple[np.ndarray, np.ndarray, list[str], list[str]]:
    """Inputs (N, D), targets (N,) or (N, T), and the names of both; without a header, columns are x0, x1, ..."""
    table = np.loadtxt(path, delimiter=source.delimiter, skiprows=int(source.has_header))
    names = [f"x{column}" for column in range(table.shape[1])]
    if source.has_header:
        with open(path, encoding="utf-8") as file:
            names = [name.strip().strip('"') for name in file.readline().split(source.delimiter)]
    targets = [column % table.shape[1] for column in source.targets]
    inputs = [column for column in range(table.shape[1]) if column not in targets]
    y = table[:, targets[0]] if len(targets) == 1 else table[:, targets]
    return table[:, inputs], y, [names[i] for i in inputs], [names[i] for i in targets]
