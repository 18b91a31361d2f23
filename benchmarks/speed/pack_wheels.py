"""Pack what a machine without a network needs to run `gpu.py`: this package, Pyro, ArviZ and what they need, as wheels.

    python benchmarks/speed/pack_wheels.py wheels [--python 3.12] [--add NAME ...] [--limit 64]

The machine is taken to have torch for CUDA with Triton, NumPy, SciPy, pandas, GPyTorch and pytest; `--add` packs more.
Carry the folder and the checkout there. In the checkout, this installs the wheels for the present Python, apart from
its other packages, and runs `gpu.py`:

    bash wheels/run.sh
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("pyro-ppl", "pyro-api", "opt-einsum", "tqdm", "jaxtyping", "wadler-lindig", "beartype", "narwhals")
PACKAGES += ("safetensors", "arviz<1", "xarray", "xarray-einstats", "h5netcdf", "h5py", "platformdirs")
GLIBC = (17, 24, 27, 28, 31, 34, 35)  # platform tags manylinux_2_N that a present system accepts

RUN = """#!/usr/bin/env bash
# Installs the wheels beside this file where Python does not look by itself, and runs the benchmark; arguments are its.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
target=${TMPDIR:-/tmp}/pyro_nngp_wheels
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$target" "$here"/*.whl
export PYTHONPATH=$target${PYTHONPATH:+:$PYTHONPATH}
exec python3 benchmarks/speed/gpu.py "$@"
"""


def pip(*arguments):
    """Run pip, quietly."""
    subprocess.run([sys.executable, "-m", "pip", *arguments, "-q", "--disable-pip-version-check"], check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version on that machine")
    parser.add_argument("--add", nargs="+", default=[], metavar="NAME", help="further packages")
    parser.add_argument("--limit", type=float, default=64, help="most MiB in all")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for old in args.folder.glob("*.whl"):
        old.unlink()
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(args.folder), str(ROOT))
    platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in GLIBC]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    target = ["--only-binary=:all:", "--implementation=cp", f"--python-version={args.python}", *platforms]
    pip("download", "--no-deps", *target, "-d", str(args.folder), *PACKAGES, *args.add)
    (args.folder / "run.sh").write_text(RUN)
    size = sum(wheel.stat().st_size for wheel in args.folder.glob("*.whl")) / 2**20
    print(f"{len(list(args.folder.glob('*.whl')))} wheels, {size:.1f} MiB in {args.folder}")
    if size > args.limit:
        parser.error(f"more than {args.limit} MiB")


if __name__ == "__main__":
    main()
