"""Prints the PTX of the named kernels that cross worlds as JSON {name: text}, or the missing package.

Run with EPMOE_DEVICE=gpu; needs no GPU.
"""

import json
import sys

from epmoe import kernels
from epmoe.kernels import LaunchConfig, plain
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import UnavailableError

CFG = EPConfig(4, 256, 8, 7168, 128, p2p_world_size=2, use_shmem=True)
LAUNCH = LaunchConfig(n_sms=132, num_threads=1024)


def ptx(name):
    try:
        if name.startswith("plain "):
            return getattr(plain, f"{name.removeprefix('plain ')}_kernel")(CFG, LAUNCH).ptx((9, 0))
        return getattr(kernels, f"{name}_kernel")(CFG, LAUNCH).kernel().ptx()
    except UnavailableError as error:
        return f"unavailable: {error}"


json.dump({name: ptx(name) for name in sys.argv[1:]}, sys.stdout)
