"""What the rows kernels record when a wait expires, and the host's message for it. Words: epmoe/kernels/status.py."""

import numpy as np

from epmoe_ref.errors import EPValueError, PeerTimeout

from .. import status

ROWS_DISPATCH, ROWS_COMBINE = 11, 12
PHASES = {ROWS_DISPATCH: "dispatch of rows", ROWS_COMBINE: "combine of rows"}
FOR_ANNOUNCEMENT, FOR_ARRIVAL, FOR_BLOCKS, FOR_WINDOW = 11, 12, 13, 14


def raise_if_failed(words, rank: int, timeout_s: float, announced):
    """Raises PeerTimeout if a wait of this rank expired.

    words: the status words. announced: [2, n_ranks], the calls of which this rank has notes, by parity.
    """
    if not words[status.FAILED]:
        return
    phase, waited_for = PHASES[int(words[status.FAILED])], int(words[status.WAITED_FOR])
    if waited_for == FOR_BLOCKS:
        what = ("waited for this rank's own blocks, which do not all run at once: take fewer SMs or share the device "
                "less")
    else:
        missing, did = [int(words[status.INDEX])], "send all its rows"
        if waited_for in (FOR_ANNOUNCEMENT, FOR_WINDOW):
            epoch = int(words[status.EXPECTED])
            silent = np.flatnonzero(np.asarray(announced)[epoch & 1] != epoch).tolist()
            if waited_for == FOR_ANNOUNCEMENT or silent:
                missing, did = silent or missing, "begin the call"
        what = f"source rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} did not {did}"
    raise PeerTimeout(f"rank {rank}, {phase}: {what}; gave up after timeout={timeout_s:g} s")


def raise_if_bad_ids(words, rank: int):
    """Raises EPValueError if the kernels met ids that they had to treat as -1."""
    outside, repeated = int(words[status.BAD_IDS]), int(words[status.REPEATED_IDS])
    if outside or repeated:
        raise EPValueError(
            f"rank {rank}: token_indices[{words[status.BAD_TOKEN] - 1}, {words[status.BAD_SLOT]}] is "
            f"{words[status.BAD_ID]}; {outside} ids outside [0, num_experts) and {repeated} repeated ids were "
            "treated as -1 (no expert): give each token distinct ids, and -1 for empty slots")
