"""What the launches of a dispatch or combine follow from, for comparison with other calls; UNSEEN if that is not known.

A key is all of it. A form is the key without addresses, which go with it as Places.
"""

from epmoe.host.arrays import DeviceArray
from epmoe.host.dispatched import ARRAYS, Dispatched
from epmoe.host.elsewhere import Place
from epmoe.host.looks import UNSEEN, look

WRITTEN = ARRAYS[
    :-1
]  # arrays of the caller that a dispatch may be written into; topk_ids are always lent


def of_dispatch(key, loan):
    """(the form of a dispatch, its Places)."""
    x, ids, scale, *to = key
    to = to[0] if to else ()
    places = [Place(one[0]) for one in (x, ids, *to)]
    return ("dispatch", x[1:], ids[1:], scale, forms_of(to)), (*places, _loaned(loan))


def of_combine(key, sent_loan, loan):
    """(the form of a combine, its Places); loan: of the result, None if it goes into an array of the caller."""
    y, where, n, weights, epilogue, to = key
    seen = [one for one in (weights, to) if type(one) is tuple]
    form = "combine", y[1:], len(where), n, weights and _form(weights), epilogue, to and to[1:]
    places = [
        Place(y[0]),
        *(map(Place, where) if len(where) > 1 else [_loaned(sent_loan)]),
        *(Place(one[0]) for one in seen),
    ]
    return form, (*places, _loaned(loan)) if loan is not None else tuple(places)


def _form(weights):
    return weights[1:] if type(weights) is tuple else weights


def forms_of(to):
    """What was seen of arrays to write into (of a dispatch_key), without where they lie."""
    return tuple([one[1:] for one in to])


def _loaned(loan):
    return Place(loan.buffer.address, loan.buffer.nbytes)


def dispatch_key(x, ids, input_scale, out):
    """The key of a dispatch; x, ids: what look() saw of tokens and topk_ids. out: a Dispatched to write to, or None."""
    if x is UNSEEN or ids is UNSEEN or type(input_scale) is not float:
        return UNSEEN
    if out is None:
        return x, ids, input_scale
    to = [(look(array), name) for name, array in arrays_of(out).items()]
    if any([seen is UNSEEN for seen, _ in to]):
        return UNSEEN
    return x, ids, input_scale, tuple([(*seen, name) for seen, name in to])


def arrays_of(out):
    """{name: array} of a Dispatched that a dispatch is to be written into."""
    given = {name: getattr(out, name, None) for name in WRITTEN}
    return {name: array for name, array in given.items() if array is not None}


def combine_key(sent, y, d, weights, router_weights, epilogue, out):
    """The key of a combine; sent: this rank's Sent of the open round, which d must be of; else combine's arguments.

    y, weights: what look() saw of expert outputs and router weights.
    """
    if y is UNSEEN or type(d) is not Dispatched or d.round is not sent:
        return UNSEEN
    if weights is UNSEEN and router_weights is not None:
        if not callable(router_weights):
            return UNSEEN
        weights = router_weights
    to = None
    if out is not None:
        to = look(out)
        if to is UNSEEN:
            return UNSEEN
    where = _places(sent, d.__dict__)
    if where is UNSEEN:
        return UNSEEN
    return y, where, sent.tokens.n, weights, epilogue, to


def _places(sent, seen):
    """Where src_info and topk_ids of a Dispatched lie: the address of its loan if where they always do, else both."""
    loan = sent.loan
    if "src_info" not in seen and "topk_ids" not in seen and not sent.results.given:
        return (
            loan.buffer.address,
        )  # arrays that nobody has looked at so far are not made for this
    src_info, topk_ids, places = seen.get("src_info"), seen.get("topk_ids"), ()
    for name, array in (("src_info", src_info), ("topk_ids", topk_ids)):
        if array is None:
            array = sent.array(name)
        if type(array) is DeviceArray and array.strides is None:
            places += (array.address,)
        elif sent.results.given and array is sent.results.array(name) and look(array) is not UNSEEN:
            places += (sent.results.address(name),)
        else:
            return UNSEEN
    usual = loan.address("src_info"), loan.address("topk_ids")
    return (loan.buffer.address,) if places == usual else places
