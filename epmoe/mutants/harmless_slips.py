"""Slips that change nothing, each with the reason why; judged as those of harmless.py are. Names are Slip.key."""

HARMLESS_SLIPS = {
}
