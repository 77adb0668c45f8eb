"""Runs a program in each of some ranks, as torchrun does; the ranks are forks of this process, which has torch.

Arguments: the number of ranks, the folder of their outputs, and the program.
"""

import runpy
import sys

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def run_rank(program):
    """Run it, and return nothing: what it leaves cannot be pickled."""
    runpy.run_path(program, {}, "__main__")


count, logs, program = sys.argv[1:]
# as --standalone, --redirects=3 and --log-dir have it
meeting = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "forked"}
specs = DefaultLogsSpecs(log_dir=logs, redirects=Std.ALL)
how = {"nproc_per_node": int(count), "start_method": "fork", "max_restarts": 0, "logs_specs": specs}
config = LaunchConfig(min_nodes=1, max_nodes=1, **meeting, **how)
elastic_launch(config, run_rank)(program)
