"""Compile every case's kernel to PTX for sm_90 without a GPU; print {word: ptx} as JSON. Run as a program."""

import json
import sys


def main():
    from word_cases import CASES

    texts = {}
    for case in CASES.values():
        if case.kernel not in texts:
            texts[case.kernel] = case.kernel.ptx()
    json.dump({name: texts[case.kernel] for name, case in CASES.items()}, sys.stdout)


if __name__ == "__main__":
    main()
