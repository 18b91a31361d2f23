"""Registers, spills and shared memory of the GPU kernels, compiled ahead of time: needs Triton, but no GPU.

    python benchmarks/speed/gpu_resources.py [--arch 90] [--num-neighbors 16 32 64 128 256] [--dims 2] [--learned]

Per kernel, dtype and K it prints what the assembler reports, the instructions of the loop bodies by kind, and how many
programs fit on a multiprocessor, by registers and by shared memory (65,536 registers, 227 KB).
"""

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pyro_nngp.gpu import kernels
from pyro_nngp.gpu.conditional import constants, tiles
from pyro_nngp.kernels.radial import MATERN, MATERN52
from pyro_nngp.native.conditional import Problem

NAMES = {torch.float32: "fp32", torch.float64: "fp64"}
KINDS = ("FFMA", "DFMA", "DMMA", "LDS", "STS", "LDG", "STG", "SHFL", "BAR", "MUFU")


def compiled(kernel, profile, num_neighbors, dims, dtype, arch, noise=True):
    """A kernel as it is launched with gradients of covariance and noise."""
    k = num_neighbors
    x = torch.zeros(1, dims, dtype=dtype)
    rows = torch.zeros(1, k, dtype=torch.int64)
    problem = Problem(x, x, x[0], x[0, 0], x.new_zeros(1, k) if noise else None, rows, profile, 1e-6)
    values = constants(problem) | {"KEEP": True}
    values = {name: value for name, value in values.items() if name in kernel.arg_names}
    types = {"neighbors": "*i64", "flags": "*i32", "ROWS": "i32"}
    types |= dict.fromkeys([*kernels.SIZES, *kernels.FLAGS], "i32")
    signature = {name: types.get(name, f"*{NAMES[dtype]}") for name in kernel.arg_names}
    signature |= dict.fromkeys(values, "constexpr")
    place = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    given = {*kernels.INPUTS, "grad_w", "grad_v"}
    made = [name for name, type_ in signature.items() if type_.startswith("*") and name not in given]
    aligned = {place[name]: [["tt.divisibility", 16]] for name in [*made, "ROWS"]}
    constexprs = {place[name]: value for name, value in values.items()}
    options = {"num_warps": tiles(k).warps, "num_stages": 1, "maxnreg": tiles(k).registers}
    source = ASTSource(kernel, signature=signature, constexprs=constexprs, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def tool(name, *arguments):
    """Output of one of NVIDIA's tools that come with Triton."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def resources(binary):
    """What the assembler used, and instructions by kind."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary.asm["cubin"])
        used = dict(re.findall(r"(REG|STACK):(\d+)", tool("cuobjdump", "-res-usage", file.name)))
        code = tool("nvdisasm", "-c", file.name)
    kinds = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)", code, re.M)
    count = Counter(kinds)
    threads = 32 * binary.metadata.num_warps
    fit = min(65536 // (int(used["REG"]) * threads), 227 * 1024 // max(1, binary.metadata.shared + 1024), 32)
    row = {"registers": int(used["REG"]), "stack": int(used["STACK"]), "shared": binary.metadata.shared}
    row |= {"programs": fit, "instructions": len(kinds)}
    return row | {kind: count[kind] for kind in KINDS}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, default=90, help="compute capability, without the dot")
    parser.add_argument("--num-neighbors", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--dims", type=int, default=2)
    parser.add_argument("--learned", action="store_true", help="a Matern kernel whose smoothness is learned")
    parser.add_argument("--dtype", choices=["float32", "float64", "both"], default="both")
    given = parser.parse_args()
    dtypes = list(NAMES) if given.dtype == "both" else [getattr(torch, given.dtype)]
    header, profile = None, MATERN if given.learned else MATERN52
    for dtype in dtypes:
        for k in given.num_neighbors:
            for kernel in (kernels.conditional, kernels.gradient):
                row = {"kernel": kernel.fn.__name__, "dtype": NAMES[dtype], "K": k, "warps": tiles(k).warps}
                row |= resources(compiled(kernel, profile, k, given.dims, dtype, given.arch))
                if header is None:
                    header = list(row)
                    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
                print("| " + " | ".join(str(row[name]) for name in header) + " |", flush=True)


if __name__ == "__main__":
    main()
