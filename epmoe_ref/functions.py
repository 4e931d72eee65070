"""Functions of the caller (epilogue, router weights): can they be called with what they will be given?"""

import inspect

from .errors import EPValueError


def check_function(name: str, function, parameters: tuple[str, ...], args) -> None:
    """EPValueError unless `function` takes the parameters and one more argument for each entry of args.

    function None means that there is none; then args must be empty.
    """
    if function is None:
        if args:
            raise EPValueError(f"{name}_args has {len(args)} entries, and there is no {name} function that would take "
                               "them: leave them out")
        return
    if not callable(function):
        raise EPValueError(f"{name} is of type {type(function).__name__} and must be a function "
                           f"({', '.join(parameters)}, *{name}_args)")
    try:
        inspect.signature(function).bind(*parameters, *args)
    except TypeError as error:
        raise EPValueError(f"{name} cannot be called with ({', '.join(parameters)}) and {len(args)} of {name}_args: "
                           f"{error}") from None
    except ValueError:
        pass        # built-in functions and NumPy's have no signature
