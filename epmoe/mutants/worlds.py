"""The small worlds in which mutants run. Each runs lines of the kernels that the others do not.

All are tiny and uneven: a rank with fewer tokens, an expert without any, ids of -1, more rows than warps. Several
rounds without a reset are in flight at once, so one rank may be a round ahead of another.
"""

from epmoe.mutants.page_worlds import PAGE_WORLDS
from epmoe.mutants.plain_worlds import PLAIN_WORLDS
from epmoe.mutants.public_worlds import PUBLIC_WORLDS
from epmoe.mutants.rows_worlds import ROWS_WORLDS
from epmoe.mutants.threshold_worlds import THRESHOLD_WORLDS

WORLDS = {w.name: w for w in (*PAGE_WORLDS, *PLAIN_WORLDS, *ROWS_WORLDS, *PUBLIC_WORLDS, *THRESHOLD_WORLDS)}
