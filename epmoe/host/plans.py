"""Plans: what the first call with these options and forms of arrays has prepared, for the later ones."""

MOST_PLANS = 4096


class Plans(dict):
    """{key of a call: its plan}. A full one is emptied before the next plan comes."""

    def __setitem__(self, key, plan):
        if len(self) >= MOST_PLANS:
            self.clear()
        super().__setitem__(key, plan)
