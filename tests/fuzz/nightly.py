"""How many random worlds run through the kernels: a sample, or EPMOE_FUZZ of them; in batches, for many cores."""

import os

from hypothesis import HealthCheck, Phase, seed, settings

SAMPLE = 8
WORLDS = int(os.environ.get("EPMOE_FUZZ", SAMPLE))
FEWEST, A_BATCH = 2, 12  # batches, and worlds of one where there are more batches
PHASES = (Phase.generate, Phase.shrink) if "EPMOE_FUZZ" in os.environ else (Phase.generate,)


def batches(share):
    """The numbers of the batches that a share of all worlds makes."""
    return range(max(FEWEST, int(WORLDS * share) // A_BATCH if WORLDS >= 1000 else 0))


def law(batch, share):
    """Decorator: a property to be checked in this batch's part of a share of all worlds; the same ones in every run."""
    # the first one is always the smallest there is
    most = 1 + max(1, int(WORLDS * share) // len(batches(share)))

    def decorate(check):
        return seed(batch)(
            settings(
                max_examples=most, deadline=None, database=None, phases=PHASES, suppress_health_check=list(HealthCheck)
            )(check)
        )

    return decorate
