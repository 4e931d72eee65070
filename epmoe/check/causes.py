"""Chooses among likely causes. One that explains all ranks is preferred to one that explains only this rank."""

OR = "; or "


def explained(differences, candidates, general=()):
    """The differences with their causes. candidates(difference) lists the sentences that would explain it.

    If several explain everything, all are named, joined by OR. Causes in `general` are used only if there is no other.
    """
    found = [(d, candidates(d)) for d in differences]
    return [d.because(_best(d, causes, found, general)) if causes else d for d, causes in found]


def _best(difference, causes, found, general):
    alike = [set(others) for d, others in found if d.what == difference.what]
    common = set.intersection(*alike)
    return best([cause for cause in causes if not common or cause in common], general)


def best(causes, general=()):
    """The sentences joined as one, without `general` if there is another; "" if there are none."""
    return OR.join([cause for cause in causes if cause not in general] or causes)
