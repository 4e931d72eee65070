"""The small worlds in which mutants are hunted: each makes lines of the kernels run that the others leave out.

All are tiny, and uneven: a rank with fewer tokens, an expert without any, -1 slots, more rows than warps, several
rounds without a reset, all of them in flight at once, so that one rank may be a round ahead of another.
"""

from epmoe.mutants.page_worlds import PAGE_WORLDS
from epmoe.mutants.plain_worlds import PLAIN_WORLDS
from epmoe.mutants.public_worlds import PUBLIC_WORLDS
from epmoe.mutants.rows_worlds import ROWS_WORLDS

WORLDS = {w.name: w for w in (*PAGE_WORLDS, *PLAIN_WORLDS, *ROWS_WORLDS, *PUBLIC_WORLDS)}
