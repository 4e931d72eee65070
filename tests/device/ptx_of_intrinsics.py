"""Compile the named cases' kernels to PTX for sm_90 without a GPU; print {intrinsic: ptx} as JSON. Run as a program."""

import json
import sys


def main():
    from intrinsic_cases import CASES

    texts, cases = {}, {name: CASES[name] for name in sys.argv[1:]}
    for case in cases.values():
        if case.kernel not in texts:
            texts[case.kernel] = case.kernel.ptx()
    json.dump({name: texts[case.kernel] for name, case in cases.items()}, sys.stdout)


if __name__ == "__main__":
    main()
