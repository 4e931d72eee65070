"""The options that a world passes to its simulator. They are checked even on a GPU, which ignores them."""

from numbers import Integral

from epmoe_ref.errors import EPValueError

SWITCHES = ("racecheck", "stale", "expire_waits", "stop_at_first_race")
OPTIONS = ("seed", *SWITCHES, "n_sms", "resident_limit", "recorder")


def checked(world, own, options):
    """The checked options, whole numbers as ints. own: names of the world's other arguments, for the message."""
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        name = unknown[0]
        raise EPValueError(
            f"{type(world).__name__} has no option {name}={options[name]!r}; it has "
            f"{', '.join(own)}, and the simulator's: {', '.join(OPTIONS)}"
        )
    seed = options.get("seed")
    if seed is not None and not is_whole(seed):
        raise EPValueError(f"seed={seed!r} must be a whole number, or None for a round-robin schedule")
    for name in ("n_sms", "resident_limit"):
        value = options.get(name)
        if value is not None and (not is_whole(value) or value < 1):
            raise EPValueError(f"{name}={value!r} must be a whole number, at least 1, or None for the simulator's own")
    for name in SWITCHES:
        if getattr(options.get(name), "shape", ()) or options.get(name) not in (None, True, False):
            raise EPValueError(f"{name}={options[name]!r} must be True or False")
    return {name: int(value) if is_whole(value) else value for name, value in options.items()}


def is_whole(value):
    """Whether this is an int, also one of NumPy's, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)
