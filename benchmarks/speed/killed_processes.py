"""Kill a process of a training at random moments; torchrun starts all again, and the end must be the same.

``python benchmarks/speed/killed_processes.py --kills 20``, or the same with ``--method VNNGP``. Each trial runs `LOO`
on counts, or `VNNGP` with its sites, with two Gloo processes and a checkpoint every five steps, kills one of the two by
SIGKILL at a random moment of its run, and compares hyperparameters and losses at the end, bit for bit, with those of a
run that nobody disturbed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import pyro_nngp as nngp
from pyro_nngp.distributed import ShardedData, join_group
from pyro_nngp.inference import Checkpoint
from pyro_nngp.likelihoods import NegativeBinomial

STEPS = {"LOO": 120, "VNNGP": 40}


def train(folder, method):
    """One process of the training; it notes its number in the system, and the first one the result."""
    join_group(timeout=timedelta(seconds=60))
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(4_000, 2, generator=generator, dtype=torch.float64)
    y = torch.poisson((torch.sin(6 * x[:, 0]) + 1).exp(), generator=generator)
    (folder / f"process{dist.get_rank()}").write_text(str(os.getpid()))
    rows, options = {"LOO": (4_000, {}), "VNNGP": (1_500, {"solve_every": 10})}[method]
    gp = getattr(nngp, method)(ShardedData(x[:rows], y[:rows]), likelihood=NegativeBinomial(), num_neighbors=10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint, steps = Checkpoint(folder / "run", every=5), STEPS[method]
        result = nngp.fit(gp, steps, batch_size=1_000, checkpoint=checkpoint, progress=False, **options)
    if dist.get_rank() == 0:
        found = {"lengthscale": gp.kernel.lengthscale.tolist(), "losses": result.losses.tolist()}
        (folder / "result.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def trial(folder, wait, method):
    """The result of a run with one kill after some seconds (None: no kill), its seconds, and whether one was killed."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3", __file__]
    begin = time.perf_counter()
    with open(folder / "log", "w") as log:
        run = subprocess.Popen(
            [sys.executable, *launch, "--folder", str(folder), "--method", method], stdout=log, stderr=log
        )
        killed = False
        if wait is not None:
            while not (folder / "process1").exists():
                time.sleep(0.05)
            time.sleep(wait[0])
            if not (folder / "result.json").exists():
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(int((folder / f"process{wait[1]}").read_text()), signal.SIGKILL)
                    killed = True
        code = run.wait()
    if code:
        raise RuntimeError((folder / "log").read_text()[-2000:])
    return json.loads((folder / "result.json").read_text()), time.perf_counter() - begin, killed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--method", choices=list(STEPS), default="LOO")
    parser.add_argument("--folder", type=Path, help="of one process of a trial")
    args = parser.parse_args()
    if args.folder is not None:
        train(args.folder, args.method)
        return
    rng, same, kills = np.random.default_rng(0), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        expected, seconds, _ = trial(Path(folder), None, args.method)
        started = (Path(folder) / "process1").stat().st_mtime
        length = (Path(folder) / "result.json").stat().st_mtime - started
    print(f"undisturbed: {seconds:.1f} s, of which {length:.1f} s after the start of the processes", flush=True)
    while kills < args.kills:
        with tempfile.TemporaryDirectory() as folder:
            wait = rng.uniform(0, length), int(rng.integers(2))
            found, seconds, killed = trial(Path(folder), wait, args.method)
        kills += killed
        same += killed and found == expected
        equal = "the same end" if found == expected else "ANOTHER END"
        print(f"process {wait[1]} killed after {wait[0]:.2f} s: {killed}, {seconds:.1f} s, {equal}", flush=True)
    print(f"{same} of {kills} runs with a kill end with the same bits")


if __name__ == "__main__":
    main()
